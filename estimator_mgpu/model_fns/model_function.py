"""`ModelFunction`: a model_fn that was made of another one, and can be pickled as that can."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any


class ModelFunction:
    """A function that was made of a model_fn, and that pickle finds by its name or makes again.

    Pickle writes down a function's name only, and refuses a function that its module doesn't have
    under its name. A decorated model_fn is there. `several = replicate(model_fn)` isn't: it has the
    name of the model_fn. So that is written down, and what is made of it.

    Examples:
      >>> import pickle
      >>> model_fn = ModelFunction(lambda features: 'called', str, 'made again')
      >>> model_fn(features=1)
      'called'
      >>> pickle.loads(pickle.dumps(model_fn))
      'made again'

    Args:
      function: what is called, with the name, signature and attributes that this is to have.
      make: makes this again.
      *arguments: what `make` is called with, the model_fn among them.
    """

    __qualname__: str  # as a function's

    def __init__(self, function: Callable[..., Any], make: Callable[..., Any], *arguments: Any):
        functools.update_wrapper(self, function)
        vars(self).update(vars(function))  # Its `__wrapped__` is the model_fn still.

        def again() -> Any:
            return make(*arguments)

        # Where pickle finds this object by its name, it finds this function, too. cloudpickle takes
        # along the functions of a notebook, this one as well, for they cannot be found elsewhere.
        again.__module__ = self.__module__
        again.__qualname__ = f'{self.__qualname__}._again'
        self._again = again
        self._function = function
        self._made_by = make, arguments

    @property
    def __call__(self) -> Callable[..., Any]:
        """The function itself, as Estimator looks at the arguments of what is called."""
        return self._function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method of the instance, as a function in a class is."""
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return repr(self._function)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What pickle and copy do with it: see the module `copyreg` of Python."""
        if _named(self.__module__, self.__qualname__) is not self:
            return self._made_by
        if protocol < 4:
            # It writes `_again` as an attribute of this object: that would begin anew with this.
            return self.__qualname__
        return _found_or_made, (self._again,)


def _found_or_made(again: Callable[[], Any]) -> Any:
    """Returns the object that has `again`, if it is found by its name; else makes it again."""
    outer = _named(again.__module__, again.__qualname__.rpartition('.')[0])
    return outer if getattr(outer, '_again', None) is again else again()


def _named(module: str, name: str) -> Any:
    """Returns what a name such as 'Model.model_fn' stands for in a module; None for nothing."""
    try:
        return operator.attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return None
