"""Build hook: editable installs get the lm-eval start-up file too.

``force-include`` puts ``umim_lm_eval.pth`` at the top of a built wheel. An editable wheel ignores
that table, so the file is added here. The module it imports is found through the checkout, which
the editable install puts on the path.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

START_UP_FILE = "umim_lm_eval.pth"


class StartUpFileHook(BuildHookInterface[Any]):
    """Add the start-up file to editable wheels."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the start-up file when the wheel is editable.

        Args:
            version: The build variant, ``"standard"`` or ``"editable"``.
            build_data: What goes into the wheel; changed in place.
        """
        if version == "editable":
            build_data["force_include_editable"][START_UP_FILE] = START_UP_FILE
