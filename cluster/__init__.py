"""Where the engine is put together, and what its user touches."""

from cluster.client import Client, submit
from cluster.config import EngineConfig
from cluster.handle import RequestHandle
from cluster.scoring import Score, ScoringParams
from scheduler.errors import (
    CannotMigrate,
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    HaversackError,
    InvalidConfig,
    InvalidRequest,
    ModelNotFound,
    NumericalError,
    Overloaded,
    RequestFailed,
    RequestTooLarge,
    StartupFailed,
    UnknownRequest,
    UnknownWorker,
    UnsupportedModel,
)
from scheduler.outputs import CompletionDelta, CompletionOutput, Logprob, RequestOutput
from scheduler.sampling_params import SamplingParams

__all__ = [
    "CannotMigrate",
    "Client",
    "CompletionDelta",
    "CompletionOutput",
    "DeadlineExceeded",
    "DuplicateRequest",
    "EngineConfig",
    "EngineUnavailable",
    "HaversackError",
    "InvalidConfig",
    "InvalidRequest",
    "Logprob",
    "ModelNotFound",
    "NumericalError",
    "Overloaded",
    "RequestFailed",
    "RequestHandle",
    "RequestOutput",
    "RequestTooLarge",
    "SamplingParams",
    "Score",
    "ScoringParams",
    "StartupFailed",
    "UnknownRequest",
    "UnknownWorker",
    "UnsupportedModel",
    "submit",
]
