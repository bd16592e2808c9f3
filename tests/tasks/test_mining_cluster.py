"""A node that is lost while n-grams are counted: the same digest or a typed error, never a hang."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray._private.node import Node
from ray.cluster_utils import Cluster
from tiny_mining import InProcess, NoCluster, TinyCorpus
from transformers import PreTrainedTokenizerBase

import tasks.mine
from tasks.cluster import _private_environment, _refresh_ray_settings, ray_cluster, worker_environment
