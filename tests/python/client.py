"""A client that has the contract alone: registers a model, puts pages, finds, reads and deletes them.

Usage: client.py HOST:PORT. Exits with 0 and the word `good` if everything was as the contract says.
"""

import struct
import sys
import zlib

import grpc

from kvarts.v1 import models_pb2, models_pb2_grpc, reads_pb2, reads_pb2_grpc, store_pb2, store_pb2_grpc

PAGE = 4096


def identity():
    return models_pb2.Identity(
        model="pages", revision="python", tokenizer="none", adapter="none", kv_dtype="bf16",
        quantisation_recipe="none", quantisation_scales="none", rope="none", window="none",
        arrangement_engine="python", arrangement_layout="flat", arrangement_version="1", block_tokens=16,
    )


class Said:
    """What one call has said so far, digested as types.proto says: numbers of 8 bytes, and bytes behind their length."""

    def __init__(self):
        self.crc = 0

    def numbers(self, *numbers):
        self.crc = zlib.crc32(struct.pack(f"<{len(numbers)}Q", *numbers), self.crc)

    def bytes(self, data):
        self.numbers(len(data))
        self.crc = zlib.crc32(data, self.crc)

    def get(self, request):
        assert not request.HasField("column") and not request.HasField("layers")
        self.numbers(1)
        self.bytes(request.namespace)
        self.numbers(0, 0, 0, 0, 0, 0, getattr(request, "class"))
        self.bytes(request.keys)

    def errors(self, error):
        self.numbers(error.kind, error.reason)

    def read(self, reply):
        """Takes in a message of a Get."""
        kind = reply.WhichOneof("part")
        if kind == "data":
            data = reply.data
            self.numbers(1, data.layer, data.first_block, data.blocks, data.offset)
            self.bytes(data.data)
        elif kind == "block":
            self.numbers(3, reply.block.block)
        elif kind == "end":
            end = reply.end
            self.numbers(4, end.usable_blocks, end.usable_layers, len(end.failures))
            for failure in end.failures:
                self.numbers(failure.block)
                self.errors(failure.error)
        assert self.crc == reply.crc32, "a message was damaged on the way"

    def model(self, identity, reply):
        assert not identity.spec_fingerprint and not identity.extras
        for field in sorted(identity.DESCRIPTOR.fields, key=lambda field: field.number)[:12]:
            self.bytes(getattr(identity, field.name).encode())
        self.numbers(identity.block_tokens)
        self.bytes(reply.spec_fingerprint)
        self.numbers(0)
        self.bytes(reply.namespace)
        assert self.crc == reply.crc32, "another model"

    def put_header(self, header):
        assert not header.HasField("column") and not header.HasField("parent")
        self.numbers(1)
        self.bytes(header.namespace)
        self.numbers(0, 0, 0, 0, 0)
        self.bytes(b"")
        self.numbers(0)
        self.bytes(header.keys)
        self.numbers(header.layout, header.durability, header.expires_after_ms)
        self.bytes(header.origins)

    def put_data(self, data):
        self.numbers(2, data.offset)
        self.bytes(data.data)

    def put_reply(self, reply):
        self.numbers(3, len(reply.outcomes))
        for outcome in reply.outcomes:
            self.numbers(outcome.what)
            self.errors(outcome.error)
        assert self.crc == reply.crc32, "the answer was damaged on the way"


def messages(said, namespace, keys, pages, damage=False):
    header = store_pb2.PutHeader(namespace=namespace, keys=b"".join(keys))
    said.put_header(header)
    yield store_pb2.PutRequest(header=header, crc32=said.crc)
    data, offset = b"".join(pages), 0
    while data:
        piece, data = data[:3000], data[3000:]
        sent = store_pb2.PutData(offset=offset, data=piece)
        said.put_data(sent)
        yield store_pb2.PutRequest(data=sent, crc32=said.crc ^ damage)
        offset += len(piece)


def read(reads, namespace, keys):
    blocks, whole, end = {}, {}, None
    request = reads_pb2.ReadRequest(namespace=namespace, keys=b"".join(keys))
    said = Said()
    said.get(request)
    for reply in reads.Get(request, timeout=30):
        assert end is None, "a message after the end"
        said.read(reply)
        kind = reply.WhichOneof("part")
        if kind == "data":
            data = reply.data
            span = blocks.setdefault((data.first_block, data.blocks), bytearray())
            assert len(span) == data.offset, "pieces out of order"
            span += data.data
        elif kind == "block":
            # Of the last range, and all of that has come.
            first = data.first_block
            assert first <= reply.block.block < first + data.blocks, "a block that did not come"
            assert len(span) == data.blocks * PAGE, "a block that is not whole"
            whole[reply.block.block] = True
        elif kind == "end":
            end = reply.end
    assert end is not None, "the stream was cut off"
    pages = {}
    for (first, count), span in blocks.items():
        for block in range(count):
            pages[first + block] = bytes(span[block * PAGE:(block + 1) * PAGE])
    return {block: pages[block] for block in whole}, end


def main(address):
    channel = grpc.insecure_channel(address)
    models = models_pb2_grpc.ModelsStub(channel)
    store, reads = store_pb2_grpc.StoreStub(channel), reads_pb2_grpc.ReadsStub(channel)
    asked = models_pb2.RegisterModelRequest(identity=identity(), opaque_page_bytes=PAGE)
    model = models.RegisterModel(asked, timeout=30)
    namespace = model.namespace
    said = Said()
    said.model(asked.identity, model)
    keys = [bytes([number]) * 32 for number in range(1, 4)]
    pages = [bytes([number * 7]) * PAGE for number in range(1, 4)]
    said = Said()
    put = store.Put(messages(said, namespace, keys, pages), timeout=30)
    said.put_reply(put)
    assert [outcome.what for outcome in put.outcomes] == [store_pb2.PutOutcome.STORED] * 3, put
    found, end = read(reads, namespace, keys + [b"x" * 32])
    assert found == dict(enumerate(pages)) and end.usable_blocks == 3, end
    assert [failure.block for failure in end.failures] == [3], end
    here = store.Exists(store_pb2.ExistsRequest(namespace=namespace, keys=b"".join(keys)), timeout=30)
    assert list(here.presence) == [store_pb2.ExistsReply.HERE] * 3, here
    of_keys = store_pb2.DeleteRequest.Keys(keys=keys[0])
    assert store.Delete(store_pb2.DeleteRequest(namespace=namespace, of_keys=of_keys), timeout=30).blocks == 1
    try:
        store.Put(messages(Said(), namespace, keys[:1], pages[:1], damage=True), timeout=30)
        raise SystemExit("damaged bytes were taken")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    print("good")


if __name__ == "__main__":
    main(sys.argv[1])
