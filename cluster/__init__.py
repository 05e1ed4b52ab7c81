"""Where the engine is put together, and what its user touches."""

from cluster.client import Client, submit
from cluster.config import EngineConfig
from cluster.handle import RequestHandle
from scheduler.errors import (
    DuplicateRequest,
    EngineUnavailable,
    HaversackError,
    InvalidConfig,
    InvalidRequest,
    ModelNotFound,
    NumericalError,
    RequestFailed,
    RequestTooLarge,
    StartupFailed,
    UnsupportedModel,
)
from scheduler.outputs import CompletionDelta, CompletionOutput, Logprob, RequestOutput
from scheduler.sampling_params import SamplingParams

__all__ = [
    "Client",
    "CompletionDelta",
    "CompletionOutput",
    "DuplicateRequest",
    "EngineConfig",
    "EngineUnavailable",
    "HaversackError",
    "InvalidConfig",
    "InvalidRequest",
    "Logprob",
    "ModelNotFound",
    "NumericalError",
    "RequestFailed",
    "RequestHandle",
    "RequestOutput",
    "RequestTooLarge",
    "SamplingParams",
    "StartupFailed",
    "UnsupportedModel",
    "submit",
]
