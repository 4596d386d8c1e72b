//! What executors are asked, and the way to the one that owns a shard.

use std::sync::Arc;

use kvarts_layout::BlockKey;
use kvarts_layout::format::superblock::Chosen;

use super::links::{Ask, Links};
use super::memory_audit::Table;
use super::produced::{self, ProducedPage};
use crate::driver::{DriveLoad, Metrics};
use crate::engine::compact::chains::{Shards, Survey};
use crate::engine::compact::gather::{Gathered, Taken};
use crate::engine::compact::head::Head;
use crate::engine::compact::relocate::Moved;
use crate::engine::compact::{CompactOptions, CompactReport};
use crate::engine::read::job::ReadPart;
use crate::engine::read::lend::LendPart;
use crate::engine::recover::RecoveryReport;
use crate::engine::shared::Shared;
use crate::engine::shared::quota::{Gone, QuotaScope, ToGo};
use crate::engine::shared::spare_room::OtherShards;
use crate::engine::volume::directory::{self, Found};
use crate::engine::volume::tombstones::Graves;
use crate::engine::write::delete::{self, Answer, DeletePart};
use crate::engine::write::put::PutPart;
use crate::engine::write::put::layers::LayersPart;
use crate::index::RecordId;
use crate::io::IoFacts;
use crate::rt::mailbox::{SendError, Sender};
use kvarts_contract::api::{DeleteRequest, Leaving, SegmentBlocks, SnapshotCursor, SnapshotPage};
use kvarts_contract::class::Class;
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::{Reply, Ticket, ticket};
use kvarts_contract::{buffers::Region, io_error::DirId};

/// What other threads ask of an executor.
pub(crate) enum Message {
    /// Read the superblocks, or make the store.
    OpenDirectories { plan: directory::Plan, reply: Reply<Result<Found, Reason>> },
    /// Take over shards and recover them; they are told first what others know to be deleted, if anything.
    Adopt {
        shared: Arc<Shared>,
        shards: Vec<(u32, DirId)>,
        told: Option<Arc<Graves>>,
        /// The store is open: the executor goes on serving.
        beside: bool,
        reply: Reply<Result<Vec<RecoveryReport>, Reason>>,
    },
    /// Give up what there is of a directory that is out, so that its shards can be opened anew, and open it again by its path.
    GiveUp { shared: Arc<Shared>, dir: DirId, reply: Reply<Result<(), Reason>> },
    /// Read the superblock of a directory that is out, and compare it with those of the others.
    LookAgain { shared: Arc<Shared>, dir: DirId, reply: Reply<Result<Chosen, Reason>> },
    /// Do a part of a put.
    Put(u32, PutPart),
    /// Write layers as they come.
    PutLayers(u32, LayersPart),
    /// Do a part of a read.
    Read(ReadPart),
    /// Prove where blocks lie, and hold them for a caller that reads the files itself.
    Lend(u32, LendPart),
    /// Do a part of a delete.
    Delete(u32, DeletePart),
    /// Find what descends from a key, in all shards, and delete it.
    DeletePrefix {
        shared: Arc<Shared>,
        request: DeleteRequest,
        root: BlockKey,
        router: Arc<Router>,
        reply: Answer,
    },
    /// Say which blocks of a namespace stand behind which in this shard.
    Links(Ask, Reply<Result<Links, Reason>>),
    /// Say what its shards know to be deleted.
    Graves(Reply<Graves>),
    /// Have the directories in use begin a term, if it takes one.
    Settle(Arc<Shared>, Reply<()>),
    /// Let go of shards whose directory is gone.
    LetGo,
    /// List the blocks from this cursor on; `shards` is the number of shards of the store.
    Page { cursor: SnapshotCursor, shards: u32, reply: Reply<Result<SnapshotPage, Error>> },
    /// Name blocks of a shard that are near their eviction and were used at least so often.
    Leaving { shard: u32, least_uses: u8, reply: Reply<Result<Vec<Leaving>, Error>> },
    /// Say when blocks of a namespace were produced.
    Produced(produced::Ask, Reply<Result<ProducedPage, Error>>),
    /// Name the blocks of a shard from this segment on: those of one segment.
    Held { shard: u32, from: u32, reply: Reply<Result<SegmentBlocks, Error>> },
    /// Write a checkpoint of every shard; to prove that it can be, also where the store takes no writes.
    Checkpoint { prove: bool, reply: Reply<Result<(), Reason>> },
    /// Give segments back until the budget is kept.
    Shrink,
    /// Give segments of a shard that hold nothing back, for another one.
    GiveSpare { shard: u32, bytes: u64, reply: Reply<bool> },
    /// Count what hangs on what recovery has taken in.
    SurveyChains(Arc<Shared>),
    /// Evict for another shard, in which nothing may go.
    MakeRoom { shard: u32, reply: Reply<bool> },
    /// Evict the blocks of these records of a shard, for a quota.
    EvictRecords { shard: u32, records: (Vec<ToGo>, Class), reply: Reply<Gone> },
    /// Have shards evict for a quota, until these bytes fit as well.
    MakeQuotaRoom { shared: Arc<Shared>, scope: QuotaScope, bytes: u64, reply: Reply<bool> },
    /// Say how many bytes the file systems of the directories have free.
    FreeSpace { shared: Arc<Shared>, reply: Reply<Result<u64, Reason>> },
    /// Empty segments of every shard that are mostly dead.
    Compact(CompactOptions, Reply<Result<CompactReport, Reason>>),
    /// Coordinate the merging of chains over all executors.
    Merge(Arc<Shared>, Arc<Router>, CompactOptions, Reply<Result<CompactReport, Reason>>),
    /// Compact without being asked from now on; with the way to all executors, also merge for them.
    KeepCompact(Option<(Arc<Shared>, Arc<Router>)>),
    /// List the small records of a shard.
    Survey(u32, Reply<Survey>),
    /// Read these records of a shard.
    Gather(u32, Vec<RecordId>, Reply<Result<Vec<Gathered>, Reason>>),
    /// Write blocks as a record of a shard.
    Rewrite(u32, Box<(Head, Vec<Taken>)>, Reply<Result<Moved, Reason>>),
    /// Say what the device path is and has done.
    Inspect(Reply<(IoFacts, Metrics)>),
    /// Say what each device has.
    Drives(Reply<Vec<DriveLoad>>),
    /// Say how large the tables of its shards are.
    Tables(Reply<Vec<Table>>),
    /// Forget the headers that reads have kept.
    ForgetHeaders(Reply<()>),
    /// Register memory of the caller with the ring, or say why it is used as it is.
    Register(Arc<Region>, Reply<Result<(), String>>),
    /// Forget it again.
    Unregister(Arc<Region>),
    /// End: finish what is under way, seal nothing, write a checkpoint if `clean`.
    Stop { clean: bool, reply: Reply<Result<(), Reason>> },
}

/// The answer to a request whose executor has ended.
const CLOSING: &str = "the store is closing";

/// Which executor owns which shard, and the way to it.
pub(crate) struct Router {
    pub(crate) executors: Vec<Sender<Message>>,
    /// The executor of each shard.
    pub(crate) owners: Vec<usize>,
}

impl Router {
    /// The number of shards.
    pub(crate) fn shards(&self) -> u32 {
        self.owners.len() as u32
    }

    /// The executor of a shard.
    pub(crate) fn owner(&self, shard: u32) -> usize {
        self.owners.get(shard as usize).copied().unwrap_or(0)
    }

    /// The way to it.
    pub(crate) fn to(&self, shard: u32) -> Option<&Sender<Message>> {
        self.executors.get(self.owner(shard))
    }

    /// Sends a message to the executor of a shard.
    pub(crate) fn send(&self, shard: u32, message: Message) -> Result<(), Reason> {
        match self.offer(shard, message) {
            None => Ok(()),
            Some(_) => Err(Reason::Busy("the queue of the executor is full or closed")),
        }
    }

    /// Sends a message to the executor of a shard, and gives it back if that takes no more.
    pub(crate) fn offer(&self, shard: u32, message: Message) -> Option<Message> {
        match self.to(shard) {
            Some(sender) => sender.try_send(message).err().map(SendError::into_inner),
            None => Some(message),
        }
    }

    /// Has executors recover their shards of these, each of which is told what the others know to be deleted, if anything; `beside` what
    /// else they do.
    pub(crate) async fn adopt(
        &self,
        shared: &Arc<Shared>,
        shards: &[(u32, DirId)],
        (told, beside): (Option<Arc<Graves>>, bool),
    ) -> Result<Vec<RecoveryReport>, Reason> {
        let mut answers = Vec::new();
        for (index, sender) in self.executors.iter().enumerate() {
            let is_own = |(shard, _): &&(u32, DirId)| self.owner(*shard) == index;
            let shards = shards.iter().filter(is_own).copied().collect();
            let (reply, answer) = ticket();
            let (shared, told) = (Arc::clone(shared), told.clone());
            let message = Message::Adopt { shared, shards, told, beside, reply };
            sender.try_send(message).map_err(|_| Reason::Busy(CLOSING))?;
            answers.push(answer);
        }
        let (mut reports, mut failed) = (Vec::new(), None);
        for answer in answers {
            match answer.await.map_err(|_| Reason::Busy(CLOSING)).flatten() {
                Ok(some) => reports.extend(some),
                // None goes on behind an open store's back: what it writes would meet the next attempt.
                Err(why) if beside => drop(failed.get_or_insert(why)),
                Err(why) => return Err(why),
            }
        }
        failed.map_or(Ok(reports), Err)
    }

    /// Has executors give up what they have of a directory that is out.
    pub(crate) async fn give_up(&self, shared: &Arc<Shared>, dir: DirId) -> Result<(), Reason> {
        let mut answers = Vec::new();
        for sender in &self.executors {
            let (reply, answer) = ticket();
            let message = Message::GiveUp { shared: Arc::clone(shared), dir, reply };
            sender.try_send(message).map_err(|_| Reason::Busy(CLOSING))?;
            answers.push(answer);
        }
        for answer in answers {
            answer.await.map_err(|_| Reason::Busy(CLOSING))??;
        }
        Ok(())
    }

    /// The superblock of a directory that is out, if it can come back.
    pub(crate) async fn look_again(&self, shared: &Arc<Shared>, dir: DirId) -> Result<Chosen, Reason> {
        let first = self.executors.first().ok_or(Reason::Bug("the store has no executor"))?;
        let (reply, answer) = ticket();
        let message = Message::LookAgain { shared: Arc::clone(shared), dir, reply };
        first.try_send(message).map_err(|_| Reason::Busy(CLOSING))?;
        answer.await.map_err(|_| Reason::Busy(CLOSING))?
    }

    /// What all shards that were recovered know to be deleted.
    pub(crate) async fn graves(&self) -> Result<Graves, Reason> {
        let mut all = Graves::default();
        for sender in &self.executors {
            let (reply, answer) = ticket();
            sender.try_send(Message::Graves(reply)).map_err(|_| Reason::Busy(CLOSING))?;
            all.join(answer.await.map_err(|_| Reason::Busy(CLOSING))?);
        }
        Ok(all)
    }

    /// Has the directories in use begin a term, if it takes one.
    pub(crate) async fn settle(&self, shared: &Arc<Shared>) -> Result<(), Reason> {
        let first = self.executors.first().ok_or(Reason::Bug("the store has no executor"))?;
        let (reply, answer) = ticket();
        first.try_send(Message::Settle(Arc::clone(shared), reply)).map_err(|_| Reason::Busy(CLOSING))?;
        answer.await.map_err(|_| Reason::Busy(CLOSING))
    }

    /// Sends a part of a delete, or refuses it.
    pub(crate) fn delete(&self, shard: u32, part: DeletePart) {
        if let Some(Message::Delete(_, part)) = self.offer(shard, Message::Delete(shard, part)) {
            delete::refuse(part, &Reason::Busy("the queue of the executor is full or closed"));
        }
    }
}

impl Shards for Router {
    fn count(&self) -> u32 {
        self.shards()
    }

    fn survey(&self, shard: u32, reply: Reply<Survey>) -> Result<(), Reason> {
        self.send(shard, Message::Survey(shard, reply))
    }

    fn gather(
        &self,
        shard: u32,
        records: Vec<RecordId>,
        reply: Reply<Result<Vec<Gathered>, Reason>>,
    ) -> Result<(), Reason> {
        self.send(shard, Message::Gather(shard, records, reply))
    }

    fn rewrite(
        &self,
        shard: u32,
        record: Box<(Head, Vec<Taken>)>,
        reply: Reply<Result<Moved, Reason>>,
    ) -> Result<(), Reason> {
        self.send(shard, Message::Rewrite(shard, record, reply))
    }
}

impl OtherShards for Router {
    fn give_spare(&self, shard: u32, bytes: u64) -> Option<Ticket<bool>> {
        let (reply, answer) = ticket();
        self.offer(shard, Message::GiveSpare { shard, bytes, reply }).is_none().then_some(answer)
    }

    fn make_room(&self, shard: u32) -> Option<Ticket<bool>> {
        let (reply, answer) = ticket();
        self.offer(shard, Message::MakeRoom { shard, reply }).is_none().then_some(answer)
    }

    fn make_quota_room(&self, shared: &Arc<Shared>, scope: QuotaScope, bytes: u64) -> Option<Ticket<bool>> {
        let (reply, answer) = ticket();
        let executor = self.executors.get(scope.number() as usize % self.executors.len().max(1))?;
        let shared = Arc::clone(shared);
        // Of each put that has a part in a mailbox there is one at most.
        executor.send_over(Message::MakeQuotaRoom { shared, scope, bytes, reply }).ok()?;
        Some(answer)
    }

    fn evict_records(&self, shard: u32, records: (Vec<ToGo>, Class)) -> Option<Ticket<Gone>> {
        let (reply, answer) = ticket();
        // Of each account that makes room there is one at most.
        self.to(shard)?.send_over(Message::EvictRecords { shard, records, reply }).ok()?;
        Some(answer)
    }

    fn tell_lost(&self, shared: &Arc<Shared>) {
        for sender in &self.executors {
            // One that has ended has let go of everything.
            let _ = sender.send_over(Message::LetGo);
        }
        if let Some(first) = self.executors.first() {
            let (reply, _) = ticket();
            let _ = first.send_over(Message::Settle(Arc::clone(shared), reply));
        }
    }
}
