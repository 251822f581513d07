"""Which chief leads the other tasks, as another one may have replaced this one.

Each task has a note with the incarnation of the chief that leads it. A chief that begins writes its
own incarnation there. If it later finds another one, it has been replaced: somebody has started
another process as the chief, while this one was stopped or cut off. Then it must write nothing
more.
"""

from __future__ import annotations

import json

from estimator_mgpu.cluster import ending
from estimator_mgpu.cluster.notes import Notes
from estimator_mgpu.cluster.task import Task

_REPLACED = (
    'it was started in the place of this one, which was stopped or cut off for a while. This one '
    'ends, and writes nothing more.'
)


class Leadership:
    """The leadership of this process, which is the chief, over the other tasks.

    Attributes:
      has_begun: whether this chief has left its notes on the other tasks.
      replaced_on: the name of a task that another chief leads, in the place of this one; or ''.
      model_dirs: where this chief has trained, and left a file.
    """

    def __init__(self, task: Task) -> None:
        self.has_begun = False
        self.replaced_on = ''
        self.model_dirs: list[str] = []
        self._task = task

    def begin_training(self, model_dir: str) -> None:
        """Has to be called with the model_dir of each training, before `lead()`."""
        self._model_dir = model_dir
        self._file = ending.FileReader(model_dir)

    def lead(self) -> None:
        """Leaves a note on each task that this chief leads it, and a file in the model_dir.

        A chief that begins takes all tasks over from the chief before. Later, it only takes over
        those that have been started again.

        Raises:
          RuntimeError: if this chief has begun earlier, and another chief leads a task now.
        """
        with self._task.notes_on_all(self._task.others) as notes:
            leaders = {name: self.leader_of(notes[name]) for name in notes}
            for name, leader in leaders.items():
                if self.has_begun and self.is_another(leader):
                    self.replaced_on = name
                    raise RuntimeError(self.replacement_error())
            for name, leader in leaders.items():
                if leader != self._task.incarnation:
                    notes[name].write('end', '')
                    notes[name].write('chief', self._task.incarnation)

        self.has_begun = True
        if self._model_dir not in self.model_dirs:
            ending.write(self._model_dir, ending.Ending(self._task.incarnation))
            self.model_dirs.append(self._model_dir)

    def leader_of(self, notes: Notes) -> str:
        """The incarnation of the chief that leads the task with these notes.

        It's '' if no chief has led it yet, and for a task of another cluster.
        """
        return notes.read('chief') if self.is_of_cluster(notes) else ''

    def is_of_cluster(self, notes: Notes) -> bool:
        """Whether the task with these notes serves in this cluster."""
        cluster = notes.read('cluster')
        return bool(cluster) and json.loads(cluster) == self._task.addresses

    def is_another(self, leader: str) -> bool:
        """Whether the incarnation of a chief, if there is one, isn't this one's."""
        return leader not in ('', self._task.incarnation)

    def replacement_error(self) -> str:
        """The text of the error of this chief, which was replaced."""
        name = self.replaced_on
        return f'Another chief leads {name} at {self._task.addresses[name]}: {_REPLACED}'

    def fail_if_followed(self) -> None:
        """Raises RuntimeError if another chief has trained while this one waits for tasks.

        The file in model_dir tells it, also if that chief and its tasks have ended since. It's read
        now and then.
        """
        written = self._file.read_now_and_then()
        if written is None or written.incarnation == self._task.incarnation:
            return
        before = self._file.before
        if before is not None and written.incarnation == before.incarnation:
            return
        status = 'trains' if written.status is None else f'has ended with {written.status}'
        raise RuntimeError(f'Another chief {status} in {self._model_dir}: {_REPLACED}')
