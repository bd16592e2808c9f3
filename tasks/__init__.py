"""Pipeline stages: Prefect tasks around Ray, DeepSpeed, lm-eval and MLflow calls.

One file per stage. Tasks pass small references (directory and digest), never tensors or data sets.
``cluster/ray_cluster.py`` holds the only ``ray.init``, ``tracking/tracker.py`` the only
``import mlflow``.
"""
