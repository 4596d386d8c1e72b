//! From the tier into an engine on real files, and what that serves then.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvarts_contract::api::{Durability, KvStore, Order, Origins, Placed, ReadRequest};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Arena, Region, SharedBuf};
use kvarts_contract::clock::{OsEntropy, SystemClock};
use kvarts_layout::{Coordinate, Group};
use kvarts_store::engine::{Options, Store};
use kvarts_store::io::{Features, Io, IoChoice, open_io};
use kvarts_store::rt::threads::{MakeIo, ThreadLauncher};

use super::fixture::*;
use crate::format::names::Named;
use crate::format::samples::{self, BLOCK};
use crate::promote::{News, Restored, Wanted, restore_and_tell, restore_into};
use crate::testing::{Kind, Op, Plan};

static NUMBER: AtomicU32 = AtomicU32::new(0);

struct Engine {
    directory: PathBuf,
    store: Store,
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = block_on(self.store.close());
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

impl Engine {
    fn open() -> Self {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("kvarts-cold-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        kvarts_store::home::make(&directory).unwrap();
        let directories = vec![directory.clone()];
        let make: MakeIo = Arc::new(move |_| {
            let io = open_io(IoChoice::Pool, &directories, &Features::default());
            let io: Rc<RefCell<dyn Io>> = Rc::new(RefCell::new(io.map_err(|error| error.to_string())?));
            Ok(io)
        });
        let launcher = ThreadLauncher::new(SystemClock::new() as _, OsEntropy::new(), make);
        let options = Options { segment_bytes: 16 << 20, budget_bytes: 256 << 20, ..Options::default() };
        let store = block_on(Store::open(&launcher, &options)).unwrap().0;
        Self { directory, store }
    }

    /// The leading blocks of a prefix that it serves; each is what was put, of the production that was put.
    fn serves(&self, prefix: u8, to: u32) -> u32 {
        let namespace = self.store.register(&samples::identity("r1"), &samples::geometry()).unwrap();
        let shape = samples::geometry().shape(Group(0), Coordinate::Replicated, samples::TOKENS).unwrap();
        let memory =
            SharedBuf::new(&Region::anonymous(BLOCK * to as usize).unwrap(), 0, BLOCK * to as usize).unwrap();
        let into = Placed::blocks(&shape, memory.clone(), to).unwrap();
        let mut request =
            ReadRequest::new(namespace, Group(0), Coordinate::Replicated, keys(prefix, to), into);
        request.order = Order::Blocks;
        let origins = Origins::any(to as usize);
        let end = self.store.read_part(request, &origins, 0).unwrap().wait_blocking();
        let bytes = memory.to_vec();
        for block in 0..end.usable_blocks {
            let at = block as usize * BLOCK;
            assert_eq!(bytes[at..at + BLOCK], samples::bytes_of(prefix, block));
            assert_eq!(origins.met()[block as usize], Some(kvarts_layout::OriginId([prefix | 0x80; 16])));
        }
        end.usable_blocks
    }

    fn wanted(&self, prefix: u8, to: u32) -> Wanted {
        Wanted {
            namespace: samples::namespace_id("r1"),
            group: Group(0),
            coordinate: Coordinate::Replicated,
            keys: keys(prefix, to),
            durability: Durability::Durable,
        }
    }

    fn restore(&self, world: &World, prefix: u8, to: u32) -> Restored {
        let wanted = self.wanted(prefix, to);
        let tier = world.other();
        world.time.run(restore_into(&tier, &self.store, &wanted, &small_ranges())).unwrap()
    }
}

#[test]
fn an_empty_store_gets_what_the_tier_has_and_serves_it() {
    let world = World::new();
    world.push(&[(1, 0, 23)]).unwrap();
    let engine = Engine::open();
    let restored = engine.restore(&world, 1, 30);
    assert_eq!((restored.stored, restored.missing, restored.lost), (23, 7, 0), "{restored:?}");
    assert_eq!(engine.serves(1, 23), 23);
    // A second time nothing is read.
    let ranges = world.faulty.asked(Op::Range);
    let again = engine.restore(&world, 1, 30);
    assert_eq!((again.stored, again.already_there, world.faulty.asked(Op::Range)), (0, 23, ranges));
}

#[test]
fn what_is_brought_back_is_as_old_as_what_was_put() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    let engine = Engine::open();
    assert_eq!(engine.restore(&world, 1, 5).stored, 5);
    let (namespace, mut times) = (samples::namespace_id("r1"), Vec::new());
    for shard in 0..engine.store.shards() {
        let page = block_on(engine.store.produced(shard, namespace, 0)).unwrap().unwrap();
        times.extend(page.blocks.iter().map(|block| block.produced_ms));
    }
    // A delete that this node hears of later is of it, if it is of what was put.
    let (run, _) = samples::run("r1", 1, 0, 1);
    assert_eq!(times, vec![run.created_ms; 5]);
}

#[test]
fn bytes_that_their_digests_are_of_and_that_were_not_put_are_neither_given_nor_stored() {
    let world = World::new();
    world.push(&[(1, 0, 3)]).unwrap();
    let name =
        world.memory.names().into_iter().find(|name| matches!(Named::parse(name), Some(Named::Pack(..))));
    let name = name.unwrap();
    let mut bytes = world.memory.bytes(&name).unwrap().to_vec();
    let sound = samples::bytes_of(1, 0);
    let at = bytes.windows(BLOCK).position(|some| *some == sound[..]).unwrap();
    // The generator of CRC-32, its bits in the order of transmission: what is changed by it has the digest that it had.
    let generator = [0x41, 0x06, 0x71, 0xdb, 0x01];
    bytes[at..at + 5].iter_mut().zip(generator).for_each(|(byte, change)| *byte ^= change);
    assert_eq!(crc32fast::hash(&bytes[at..at + 64]), crc32fast::hash(&sound[..64]));
    world.memory.set(&name, bytes);
    let engine = Engine::open();
    let (tier, wanted) = (world.other(), engine.wanted(1, 3));
    let (mut came, mut lost) = (Vec::new(), Vec::new());
    let tell = |news: News<'_>| match news {
        News::Came(arrived) if arrived.bytes.is_ok() => came.push(arrived.part.ordinal),
        News::Lost(ordinal) => lost.push(ordinal),
        _ => {}
    };
    let memory = Arena::new(Region::anonymous(1 << 20).unwrap());
    let options = small_ranges();
    let restored = restore_and_tell(&tier, &engine.store, &wanted, &options, &memory, tell);
    let restored = world.time.run(restored).unwrap();
    assert_eq!((restored.stored, restored.lost), (2, 1), "{restored:?}");
    assert_eq!((came, lost), (vec![1, 2], vec![0]));
    assert_eq!(engine.serves(1, 3), 0);
}

#[test]
fn what_is_damaged_in_the_bucket_is_not_in_the_store() {
    for kind in [Kind::Altered, Kind::Truncated, Kind::Longer, Kind::Missing] {
        let world = World::new();
        world.push(&[(1, 0, 20)]).unwrap();
        let engine = Engine::open();
        let plan = Plan { next: [(Op::Range, vec![Some(kind); 5])].into(), ..Plan::default() };
        world.faulty.plan(plan);
        let restored = engine.restore(&world, 1, 20);
        assert_eq!(restored.stored + restored.lost, 20, "{kind:?} {restored:?}");
        let lost_first = restored.lost > 0;
        assert!(engine.serves(1, 20) == 20 || lost_first);
        world.faulty.plan(Plan::default());
        let rest = engine.restore(&world, 1, 20);
        assert_eq!((rest.stored + rest.already_there, rest.lost), (20, 0), "{rest:?}");
        assert_eq!(engine.serves(1, 20), 20);
    }
}
