"""What the two sides of `KvartsLayers` tell each other."""

from dataclasses import dataclass, field

from .vllm_compat import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass
class Facts(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler at the start: of each group its layers, and the bytes of a page of each."""

    groups: list


@dataclass
class Move:
    """Blocks between the pool and KV caches: by group, where they lie in the pool for each rank, and the engine's places."""

    number: int
    stretches: dict
    slots: dict
    #: The request that waits until all of it has landed; none where the step's own pass waits, layer by layer.
    waits: str | None = None


@dataclass
class Step(KVConnectorMetadata):
    """What the scheduler tells the workers for a step."""

    #: The pool and how its blocks are called, as long as some worker has not said that it has it.
    pool: str | None = None
    naming: dict | None = None
    loads: list = field(default_factory=list)
    saves: list = field(default_factory=list)
    #: Requests that are over and whose blocks are not needed any more.
    over: set = field(default_factory=set)


@dataclass
class Told(KVConnectorWorkerMetadata):
    """What the workers tell the scheduler after a step."""

    #: Workers, and the pool that each has.
    attached: dict = field(default_factory=dict)
    #: Loads and saves that are done: number -> by how many workers.
    done: dict = field(default_factory=dict)

    def aggregate(self, other):
        done = dict(self.done)
        for number, count in other.done.items():
            done[number] = done.get(number, 0) + count
        return Told({**self.attached, **other.attached}, done)
