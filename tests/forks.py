"""Starts Python programs in processes that have imported TensorFlow, as importing it takes seconds.

As a script, this module is a process that imports what the programs import, and then forks itself
for each of them. `Popen` asks it to, and otherwise is that of subprocess. Programs that start
others, as samples do for machines, have them forked as well.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time


class Forks:
    """The process that forks itself; the first `Popen` starts it."""

    def __init__(self, address=None):
        self.address = address
        self._process = None

    def start(self):
        self._directory = tempfile.TemporaryDirectory()
        self.address = os.path.join(self._directory.name, 'socket')
        environment = {**os.environ, 'CUDA_VISIBLE_DEVICES': '-1', 'TF_CPP_MIN_LOG_LEVEL': '2'}
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.address],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout.readline() == b'ready\n'

    def close(self):
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
            self._directory.cleanup()

    def ask(self, request, files=()):
        """Returns the answer; both are JSON. The other process gets copies of the open files."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address)
            socket.send_fds(connection, [b' '], files)
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            return json.loads(connection.makefile().read())


forks = Forks()


class Popen(subprocess.Popen):
    """Another process; one of Python is forked."""

    _forked = False

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        environment = dict(os.environ if env is None else env)
        added = {*environment.get('PYTHONPATH', '').split(os.pathsep)} - {'', *sys.path}
        if isinstance(args, str) or args[0] != sys.executable or added:
            start = super()._execute_child
            start(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
            return

        if forks.address is None:
            forks.start()
        # Ends of pipes, or -1: where the child reads and we write, and where it writes and we read.
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = more[3:9]
        files = [p2cread, c2pwrite, errwrite]
        files = [number if file == -1 else file for number, file in enumerate(files)]
        request = {
            'command': [str(word) for word in args[1:]],
            'environment': environment,
            'directory': str(cwd or os.getcwd()),
        }
        self.pid = forks.ask(request, files)
        self._forked = True
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def poll(self):
        if not self._forked:
            return super().poll()
        if self.returncode is None:
            self.returncode = forks.ask({'pid': self.pid})
        return self.returncode

    def wait(self, timeout=None):
        if not self._forked:
            return super().wait(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.05)
        return self.returncode


def output_of(command, directory=None, apart=True, **environment):
    """Returns what `python *command` prints; it has to end with 0.

    Args:
      command: the path of a script, or '-c' and a program; then arguments.
      directory: that it runs in; by default this process's.
      apart: whether its standard error is left out.
      environment: more environment variables.
    """
    errors = subprocess.PIPE if apart else subprocess.STDOUT
    process = Popen(
        [sys.executable, *command],
        cwd=directory,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    with process:
        try:
            printed, said = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode == 0, printed[-5000:] + (said or '')[-5000:]
    return printed


def status_of(pid):
    """Returns the exit status of a child, or None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def serve(listener):
    """Answers requests until standard input ends; returns a request in a forked process."""
    statuses = {}  # by the numbers of processes that have ended or been asked about
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        with connection:
            _, files, _, _ = socket.recv_fds(connection, 1, 3)
            request = json.loads(connection.makefile().read())
            if 'pid' in request:
                pid = request['pid']
                if statuses.get(pid) is None:
                    statuses[pid] = status_of(pid)
                answer = statuses[pid]
            else:
                answer = os.fork()
                if answer == 0:
                    listener.close()
                    return {**request, 'files': files}
                statuses.pop(answer, None)  # of a process that had the same number before
            for file in files:
                os.close(file)
            connection.sendall(json.dumps(answer).encode())


def become(environment, directory, files):
    """Has this process, which was just forked, be like one that was started by itself."""
    # A shell lets what it runs in the background ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)


def run(command):
    """Runs what `python *command` would run."""
    program, *arguments = command
    if program == '-c':
        sys.path.insert(0, '')
        sys.argv = ['-c', *arguments[1:]]
        exec(compile(arguments[0], '<string>', 'exec'), {'__name__': '__main__'})
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
        sys.argv = command
        runpy.run_path(program, run_name='__main__')


if __name__ == '__main__':
    import cluster_script  # noqa: F401, for what it imports

    gc.freeze()  # what forks share
    address = sys.argv[1]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print('ready', flush=True)
        request = serve(listener)
    if request is not None:
        command = request.pop('command')
        become(**request)
        import forks as imported

        imported.forks.address = address
        subprocess.Popen = imported.Popen
        run(command)
