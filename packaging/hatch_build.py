"""Build hook: editable installs get the lm-eval start-up hook too.

``force-include`` puts ``umim_lm_eval.pth`` and the module that it imports at the top of a built
wheel. An editable wheel ignores that table, so they are added here, as copies.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

START_UP_FILES = ("umim_lm_eval.pth", "_umim_lm_eval.py")


class StartUpFileHook(BuildHookInterface[Any]):
    """Add the start-up files to editable wheels."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the start-up files to ``build_data`` if the build variant is ``editable``."""
        if version == "editable":
            for name in START_UP_FILES:
                build_data["force_include_editable"][f"packaging/{name}"] = name
