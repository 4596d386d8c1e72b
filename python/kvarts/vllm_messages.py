"""The messages between the scheduler's side and the workers' side of `KvartsLayers`."""

from dataclasses import dataclass, field

from .vllm_compat import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass
class Facts(KVConnectorHandshakeMetadata):
    """A worker's message to the scheduler at the start: for each group its layers, with the bytes of a page of each layer."""

    groups: list


@dataclass
class Move:
    """A copy of blocks between the pool and KV caches: for each group, the positions in the pool by rank, and the engine's slots."""

    number: int
    stretches: dict
    slots: dict
    #: The request that waits until the whole move has landed; `None` if the step's own forward pass waits, layer by layer.
    waits: str | None = None


@dataclass
class Step(KVConnectorMetadata):
    """The scheduler's message to the workers for a step."""

    #: The pool's name and the identity of its blocks, until every worker has reported that it is attached.
    pool: str | None = None
    naming: dict | None = None
    loads: list = field(default_factory=list)
    saves: list = field(default_factory=list)
    #: Requests that have ended and whose blocks are no longer needed.
    over: set = field(default_factory=set)


@dataclass
class Told(KVConnectorWorkerMetadata):
    """The workers' message to the scheduler after a step."""

    #: worker -> name of the pool to which it is attached.
    attached: dict = field(default_factory=dict)
    #: Finished loads and saves: number of the move -> number of workers.
    done: dict = field(default_factory=dict)

    def aggregate(self, other):
        done = dict(self.done)
        for number, count in other.done.items():
            done[number] = done.get(number, 0) + count
        return Told({**self.attached, **other.attached}, done)
