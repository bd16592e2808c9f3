"""Make ``lm_eval --model umim`` work with lm-eval releases that have no model plugins.

``umim_lm_eval.pth`` imports this module at every interpreter start, so it uses the standard
library only, imports nothing of ``umim_core`` and does no work until ``lm_eval.models`` is
imported. Then it lets that module run and adds one lazy entry, as the module's own table would::

    import lm_eval.models -> real spec -> module runs -> finder removes itself -> umim registered

Registering earlier would hide the built-in models: lm-eval imports its own table only while the
registry is empty. An lm-eval that reads the entry point group ``lm_eval.models`` has registered
``umim`` by itself; then nothing is changed. Whatever goes wrong, ``lm_eval.models`` is imported as
if this hook were not there. ``UMIM_NO_LM_EVAL=1`` switches the hook off.
"""

import os
import sys

MODEL = "umim"
TARGET = "umim_core.evaluation.harness:UmimLM"
OPT_OUT = "UMIM_NO_LM_EVAL"
WATCHED = "lm_eval.models"


# What a registry of another design raises when it is asked in today's way.
UNKNOWN_DESIGN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def register(models):
    """Add the model to the registry and, in the module ``lm_eval.models``, to the table of lm-eval.

    An lm-eval of another design is left as it is, with a line in the log, rather than broken.
    """
    try:
        from lm_eval.api.registry import model_registry

        table = models.MODEL_MAPPING
        if MODEL in model_registry:
            return
        model_registry.register(MODEL, target=TARGET)
        table[MODEL] = TARGET
    except UNKNOWN_DESIGN as error:
        import logging  # not warnings: `python -W error` would make a failed import of one

        logging.getLogger(__name__).warning(
            "model 'umim' is registered with lm-eval 0.4.13 only; this release has another "
            "registry (%s: %s). Install lm-eval==0.4.13 to use it.",
            type(error).__name__,
            error,
        )


class RegisterAfterImport:
    """Find ``lm_eval.models`` and register the model after that module has run."""

    def find_spec(self, fullname, path=None, target=None):
        """Return the other finders' spec of ``lm_eval.models`` with its loader extended, else None.

        None leaves the import to them.
        """
        if fullname != WATCHED:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find else None
            if spec is not None:
                break
        else:
            return None
        run_module = getattr(spec.loader, "exec_module", None)
        if run_module is not None:
            import contextlib

            def run_then_register(module):
                run_module(module)
                # Only now: a caller may ask for the spec and never import the module.
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                register(module)

            # The loader belongs to this one spec, so no other import sees the change. One that
            # cannot be extended loads the module without the model.
            with contextlib.suppress(AttributeError, TypeError):
                spec.loader.exec_module = run_then_register
        return spec


def install():
    """Put the finder first on ``sys.meta_path``, unless the user opted out."""
    if os.environ.get(OPT_OUT, "") not in ("", "0"):
        return
    if WATCHED in sys.modules:
        register(sys.modules[WATCHED])
    else:
        sys.meta_path.insert(0, RegisterAfterImport())


install()
