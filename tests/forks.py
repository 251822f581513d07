"""Starts processes that have imported TensorFlow already, as importing it takes seconds.

As a script, this module is a process that imports what a cluster's machines import, and then forks
itself for each of them. `Forks` starts that process, and asks it: each line that it reads, in JSON,
is answered by one.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time


class Forks:
    """A process that forks itself."""

    def __init__(self, environment):
        command = [sys.executable, __file__]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self._lock = threading.Lock()

    def start(self, arguments, environment, log):
        """Runs cluster_script.main(*arguments) in a new process, which writes to a log."""
        return Fork(self, self.ask(arguments=arguments, environment=environment, log=log))

    def ask(self, **request):
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Fork:
    """A process that was forked, with some of the methods of subprocess.Popen."""

    def __init__(self, forks, pid):
        self._forks = forks
        self._pid = pid
        self._status = None

    def poll(self):
        if self._status is None:
            self._status = self._forks.ask(pid=self._pid)
        return self._status

    def wait(self, timeout=None):
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired('a fork', timeout)
            time.sleep(0.05)
        return self._status

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)


def status_of(pid):
    """Returns the exit status of a child, or None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def become(environment, log):
    """Has this process, which was just forked, be like one that was started by itself."""
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)


def serve():
    """Answers requests up to the end of the input; returns the arguments in a forked process."""
    while True:
        line = sys.stdin.readline()
        if not line:
            return None
        request = json.loads(line)
        if 'pid' in request:
            answer = status_of(request['pid'])
        else:
            answer = os.fork()
            if answer == 0:
                become(request['environment'], request['log'])
                return request['arguments']
        print(json.dumps(answer), flush=True)


if __name__ == '__main__':
    import cluster_script

    arguments = serve()
    if arguments is not None:
        model_dir, options = arguments
        cluster_script.main(model_dir, **options)
