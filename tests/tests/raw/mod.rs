//! A client of the local path that sends what it is told, and what is expected when it is gone.
#![allow(dead_code, reason = "each test file that includes this uses a part of it")]
#![allow(clippy::result_large_err, reason = "the contract's error, as it came")]

use std::io::{IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::BlockOutcome;
use kvarts_contract::buffers::{Region, shared};
use kvarts_layout::{BlockKey, NamespaceId};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_wire::local::frame::{Head, Kind, frame};
use kvarts_wire::local::limits::{HEAD_BYTES, MAGIC};
use kvarts_wire::proto;
use prost::Message;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use crate::served::{ClientStage, Served};

/// Bytes of one block of the column that these tests use.
pub(crate) const BLOCK: u64 = 3 * 2 * 4096;

/// A client that sends what it is told.
pub(crate) struct Raw {
    pub(crate) stream: UnixStream,
    bytes: Vec<u8>,
    pub(crate) files: Vec<OwnedFd>,
}

impl Raw {
    pub(crate) fn connect(served: &Served) -> Self {
        let stream = UnixStream::connect(served.daemon().socket().unwrap()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(30))).unwrap();
        Self { stream, bytes: Vec::new(), files: Vec::new() }
    }

    /// Connects and is let in.
    pub(crate) fn open(served: &Served) -> Self {
        Self::with_token(served, "").unwrap()
    }

    pub(crate) fn with_token(served: &Served, token: &str) -> Result<Self, proto::Error> {
        let mut raw = Self::connect(served);
        raw.stream.write_all(MAGIC).unwrap();
        raw.say(
            Kind::Hello,
            0,
            &proto::Hello { version: 1, token: token.to_owned(), ..proto::Hello::default() },
        );
        match raw.hear() {
            Some((Head { kind: Kind::Welcome, .. }, _)) => Ok(raw),
            Some((Head { kind: Kind::Failed, .. }, body)) => Err(proto::Error::decode(&body[..]).unwrap()),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn say(&mut self, kind: Kind, id: u64, message: &impl Message) {
        self.stream.write_all(&frame(kind, id, message)).unwrap();
    }

    pub(crate) fn say_with(&mut self, kind: Kind, id: u64, message: &impl Message, file: &OwnedFd) {
        let bytes = frame(kind, id, message);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        let parts = [IoSlice::new(&bytes)];
        let sent = rustix::net::sendmsg(&self.stream, &parts, &mut control, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(sent, bytes.len());
    }

    /// Sends descriptors along with some bytes.
    pub(crate) fn try_send_with(&self, bytes: &[u8], files: &[&OwnedFd]) -> rustix::io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        rustix::net::sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    }

    /// The next frame; none if the server has closed the connection.
    pub(crate) fn hear(&mut self) -> Option<(Head, Vec<u8>)> {
        loop {
            if let Ok(Some(head)) = Head::parse(&self.bytes)
                && self.bytes.len() >= HEAD_BYTES + head.length
            {
                let rest = self.bytes.split_off(HEAD_BYTES + head.length);
                let body = std::mem::replace(&mut self.bytes, rest).split_off(HEAD_BYTES);
                return Some((head, body));
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut some = [0; 65536];
            let parts = &mut [IoSliceMut::new(&mut some)];
            let got = rustix::net::recvmsg(&self.stream, parts, &mut control, RecvFlags::CMSG_CLOEXEC);
            let count = got.map(|got| got.bytes).unwrap_or(0);
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(files) = message {
                    self.files.extend(files);
                }
            }
            if count == 0 {
                return None;
            }
            self.bytes.extend_from_slice(&some[..count]);
        }
    }

    /// The answer to the last request.
    pub(crate) fn answer<M: Message + Default>(&mut self) -> Result<M, proto::Error> {
        match self.hear() {
            Some((Head { kind: Kind::Done, .. }, body)) => Ok(M::decode(&body[..]).unwrap()),
            Some((Head { kind: Kind::Failed, .. }, body)) => Err(proto::Error::decode(&body[..]).unwrap()),
            other => panic!("{other:?}"),
        }
    }

    /// Shares a pool of the server's; gives this side's view.
    pub(crate) fn pool(&mut self, memory: u32, bytes: u64) -> Arc<Region> {
        let mode = proto::LocalMode::LocalDirect.into();
        self.say(
            Kind::Share,
            u64::from(memory),
            &proto::ShareRequest { memory, mode, bytes, ..Default::default() },
        );
        self.answer::<proto::ShareReply>().unwrap();
        shared::map(self.files.pop().unwrap(), bytes, Box::new(())).unwrap()
    }

    pub(crate) fn share(
        &mut self,
        mode: proto::LocalMode,
        bytes: u64,
        file: &OwnedFd,
    ) -> Result<(), proto::Error> {
        let wire = proto::ShareRequest { memory: 77, mode: mode.into(), bytes, ..Default::default() };
        self.say_with(Kind::Share, 1, &wire, file);
        self.answer::<proto::ShareReply>().map(drop)
    }
}

pub(crate) fn key_bytes(keys: &[BlockKey]) -> bytes::Bytes {
    keys.iter().flat_map(|key| key.0).collect::<Vec<u8>>().into()
}

/// Blocks one after the other in a shared memory.
pub(crate) fn places(memory: u32, blocks: u32) -> proto::LocalPlaces {
    let target = |part: u64| proto::local_places::Target { memory, base: part * 4096, stride: BLOCK };
    proto::LocalPlaces { targets: (0..6).map(target).collect(), slots: (0..blocks).collect() }
}

pub(crate) fn column() -> Option<proto::Column> {
    let coordinate = proto::Coordinate { start: 0, count: 2, of: 2 };
    Some(proto::Column { group: 0, coordinate: Some(coordinate) })
}

pub(crate) fn local_read(
    namespace: NamespaceId,
    keys: &[BlockKey],
    into: proto::LocalPlaces,
) -> proto::LocalRead {
    let read = proto::ReadRequest {
        namespace: namespace.as_bytes().to_vec().into(),
        column: column(),
        keys: key_bytes(keys),
        ..proto::ReadRequest::default()
    };
    proto::LocalRead { read: Some(read), into: Some(into), ..proto::LocalRead::default() }
}

pub(crate) fn local_put(
    namespace: NamespaceId,
    keys: &[BlockKey],
    memory: u32,
    crc32: Vec<u32>,
) -> proto::LocalPut {
    let header = proto::PutHeader {
        namespace: namespace.as_bytes().to_vec().into(),
        column: column(),
        keys: key_bytes(keys),
        ..proto::PutHeader::default()
    };
    let from = Some(places(memory, keys.len() as u32));
    proto::LocalPut { header: Some(header), from, crc32, timeout_us: 0 }
}

/// Nothing is left of local clients.
pub(crate) fn expect_nothing_left(served: &Served) {
    served.until("nothing of a client that is gone is left", |daemon| {
        let state = daemon.state();
        let memory = state.memory.usage().iter().all(|usage| usage.used == 0);
        let shared = state.locals.mapped() + state.locals.pinned();
        memory && state.locals.clients().is_empty() && shared == 0 && state.calls() == 0
    });
}

/// Others are served as if nothing had happened.
pub(crate) fn expect_served(stage: &ClientStage, round: u64) {
    let desk = Desk::new(stage, &format!("undisturbed {round}"));
    let keys = desk.keys(0..4);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 4]);
    desk.expect(pages(), &keys, 1);
}
