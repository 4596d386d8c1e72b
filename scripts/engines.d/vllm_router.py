"""What a router knows who hears of all KV events of a vLLM, decoded by vLLM's own classes. It takes commands, one JSON document a line, and answers each
with one. Run by scripts/engines."""

import json
import os
import sys

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what is printed goes to the log
settings = json.loads(sys.argv[1])

import msgspec  # noqa: E402
import zmq  # noqa: E402
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch  # noqa: E402

#: Milliseconds that what was published takes at most.
SOON = 1000


class View:
    """Blocks of each medium, by their hashes: what is before them, and their tokens."""

    def __init__(self):
        self.blocks, self.removed, self.wrong = {}, 0, []
        self.next = None
        self.decoder = msgspec.msgpack.Decoder(type=KVEventBatch)

    def hear(self, number, payload):
        if self.next is not None and number != self.next:
            self.wrong.append(f"batch {number} came for {self.next}")
        self.next = number + 1
        for event in self.decoder.decode(payload).events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                continue
            of_medium = self.blocks.setdefault(event.medium, {})
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                if event.medium == "STORAGE" and (event.locality, event.group_idx) != ("LOCAL", 0):
                    self.wrong.append(f"{event.locality} {event.group_idx}")
                for at, name in enumerate(event.block_hashes):
                    of_medium[name] = (parent, event.token_ids[at * event.block_size : (at + 1) * event.block_size])
                    parent = name
                continue
            for name in event.block_hashes:
                if of_medium.pop(name, None) is None and event.medium == "STORAGE":
                    self.wrong.append("removed, but never stored")
                self.removed += event.medium == "STORAGE"

    def told(self):
        stored, device = self.blocks.get("STORAGE", {}), self.blocks.get("GPU", {})
        # Of what is in both places both must say the same.
        unlike = sum(device[name] != told for name, told in stored.items() if name in device)
        wrong = self.wrong + ([f"{unlike} blocks are other ones on the device"] if unlike else [])
        return {"stored": sorted(stored), "device": len(device), "removed": self.removed, "wrong": wrong}


def frames(socket):
    return socket.recv_multipart() if socket.poll(SOON) else None


context = zmq.Context()
subscriber = context.socket(zmq.SUB)
subscriber.setsockopt(zmq.SUBSCRIBE, b"")
subscriber.connect(settings["endpoint"])
view = View()
print(json.dumps({"ready": True}), file=answers, flush=True)
for line in sys.stdin:
    command = json.loads(line)["do"]
    if command == "view":
        while subscriber.poll(0):
            _, number, payload = subscriber.recv_multipart()
            view.hear(int.from_bytes(number, "big"), payload)
        answer = view.told()
    elif command == "replay":
        # A router that starts now, and asks for all.
        asking, again = context.socket(zmq.DEALER), View()
        asking.connect(settings["replay"])
        asking.send_multipart([b"", (0).to_bytes(8, "big")])
        while (parts := frames(asking)) is not None and (number := int.from_bytes(parts[2], "big", signed=True)) >= 0:
            again.hear(number, parts[3])
        asking.close(0)
        answer = again.told() if parts is not None else {"wrong": ["no end"]}
    else:
        break
    print(json.dumps(answer), file=answers, flush=True)
context.destroy(0)
