"""Where the engine is put together, and what its user touches."""

from cluster.batches import Batch, BatchOptions, BatchProgress, BatchWatcher
from cluster.client import Client, submit
from cluster.config import EngineConfig
from cluster.handle import RequestHandle
from cluster.scoring import Score, ScoringParams
from scheduler.errors import (
    Cancelled,
    CannotMigrate,
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    HaversackError,
    InvalidConfig,
    InvalidRequest,
    MissingPackage,
    ModelNotFound,
    NumericalError,
    OutputConflict,
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
    "Batch",
    "BatchOptions",
    "BatchProgress",
    "BatchWatcher",
    "Cancelled",
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
    "MissingPackage",
    "ModelNotFound",
    "NumericalError",
    "OutputConflict",
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
