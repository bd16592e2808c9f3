"""Check of a Prefect worker: a flow run has the code of the checkout that the worker stands in.

Python imports `flows` from where the environment was installed. A worker that is started in another
checkout with that environment would run the code of the first.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from tasks.cluster.ray_cluster import CHECKOUT
from umim_core.errors import ConfigError


def require_own_checkout() -> None:
    """Refuse a deployed flow run whose worker was started in another checkout.

    Raises:
        ConfigError: If the process that started this one stands in another checkout.
    """
    try:
        worker = psutil.Process().parent()
        place = None if worker is None else Path(worker.cwd())
    except psutil.Error:  # of another user, or gone
        return
    if place is None:
        return
    for folder in (place, *place.parents):
        if (folder / "prefect.yaml").is_file() and (folder / "flows" / "__init__.py").is_file():
            if folder.resolve() != CHECKOUT:
                raise ConfigError(
                    "a Prefect worker must run the flows of the checkout that it was started in",
                    f"{CHECKOUT}, by a worker in {folder}",
                    "Start the worker in that checkout, or with the environment of its own.",
                )
            return
