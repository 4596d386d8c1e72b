//! What a sweep copies into the bucket, and what it leaves.
#![allow(clippy::disallowed_methods, reason = "real stores on real directories, real time")]

use std::sync::Arc;
use std::time::Duration;

use crate::cold_blocks::world::{PATIENCE, Setting, World};
use crate::cold_blocks::{GROUP, Model, WHOLE, content, key};
use bytes::Bytes;
use kvarts_bucket::time::TokioTime;
use kvarts_cold::format::{Manifest, PackId, names};
use kvarts_cold::testing::{Conditional, Kind, Op, Plan};
use kvarts_cold::{Access, Bucket, ColdError, Condition, Limits, Tier, TierOptions};
use kvarts_contract::api::{DeleteRequest, KvStore, Order, Placed, PutRequest, Target};
use kvarts_contract::buffers::BufMut;
use kvarts_layout::NamespaceId;
use kvarts_server::cold::ColdConfig;

/// Blocks of 256 KiB that are in the store and not in the bucket: enough for several full segments.
const PUT: std::ops::Range<u64> = 100..132;

/// A store of small segments with [`PUT`], which live so long.
fn filled(config: impl Fn(&mut ColdConfig), ttl: Option<Duration>) -> World {
    let mut setting =
        Setting { layer_bytes: 64 << 10, blocks: 32, segment_bytes: 1 << 20, ..Setting::default() };
    config(&mut setting.config);
    let world = World::with("cold-spill", setting);
    world.put(PUT, ttl);
    // Puts do not wait for segments to be sealed.
    let mut before = 0;
    world.until("segments are sealed", || {
        std::thread::sleep(Duration::from_millis(100));
        let now = sealed(&world);
        now > 0 && std::mem::replace(&mut before, now) == now
    });
    world
}

/// Blocks of sealed segments, which is where sweeps look.
fn sealed(world: &World) -> usize {
    let store = world.store();
    let of = |shard| world.runtime.block_on(store.leaving(shard, 0)).unwrap().unwrap();
    (0..store.shards()).flat_map(of).map(|leaving| leaving.keys.len()).sum()
}

/// How many blocks sweeps copied.
fn swept(world: &World) -> u64 {
    world.runtime.block_on(world.cold.sweep()).unwrap();
    world.count("spilled_blocks")
}

fn is_named(world: &World, block: u64) -> bool {
    world.cold.known(world.namespace).unwrap().may_have(&key(block))
}

#[test]
fn blocks_go_into_the_bucket_if_they_are_old_used_and_dear_enough() {
    let world = filled(|_| {}, None);
    let all = swept(&world);
    assert!(all >= 3, "{all}");
    assert_eq!(PUT.filter(|block| is_named(&world, *block)).count() as u64, all);
    let token_bytes = world.shape.block_bytes() / 16;
    assert_eq!(swept(&filled(|config| config.age = Duration::from_secs(3600), None)), 0, "too young");
    assert_eq!(swept(&filled(|config| config.token_bytes = Some(token_bytes), None)), all);
    assert_eq!(swept(&filled(|config| config.token_bytes = Some(token_bytes - 1), None)), 0, "too cheap");
    let world = filled(|config| config.uses = 1, None);
    assert_eq!(swept(&world), 0, "not used");
    let blocks: Vec<u64> = PUT.collect();
    assert_eq!(world.read(&blocks, Order::Blocks).0.len(), blocks.len());
    assert!(swept(&world) > 0, "used");
    // Longer than it must have been there it must have to live.
    let age = Duration::from_millis(900);
    let world = filled(|config| config.age = age, Some(age + age / 2));
    std::thread::sleep(age);
    assert_eq!(swept(&world), 0, "expires soon");
}

#[test]
fn what_the_bucket_has_is_not_copied_again() {
    let setting = Setting { layer_bytes: 64 << 10, blocks: 32, segment_bytes: 1 << 20, ..Setting::default() };
    let world = World::with("cold-spill-again", setting);
    world.put(0..32, None);
    let read = || world.store().stats().counts.blocks_read;
    let before = (world.faulty.asked(Op::Put), read());
    assert_eq!(swept(&world), 0);
    assert_eq!((world.faulty.asked(Op::Put), read()), before, "nor is it read");
}

#[test]
fn little_of_a_namespace_is_copied_once_in_a_while() {
    let world = filled(|_| {}, None);
    let first = swept(&world);
    // What was copied is deleted, so that others are next.
    let copied: Vec<u64> = PUT.filter(|block| is_named(&world, *block)).collect();
    let keys = copied.iter().map(|block| key(*block)).collect();
    let target = Target::Keys { column: None, keys };
    let request = DeleteRequest { namespace: world.namespace, target, deadline: None };
    world.runtime.block_on(world.store().delete(request)).unwrap().unwrap();
    world.put(200..232, None);
    let leaving = (0..world.store().shards())
        .flat_map(|shard| world.runtime.block_on(world.store().leaving(shard, 0)).unwrap().unwrap());
    let others = leaving.flat_map(|one| one.keys).filter(|next| !copied.iter().any(|one| key(*one) == *next));
    assert!(others.count() > 0, "others are next");
    assert_eq!(swept(&world), first, "less than a pack, again");
}

#[test]
fn what_is_deleted_while_a_sweep_has_it_is_not_named() {
    let world = filled(|_| {}, None);
    let before = world.faulty.asked(Op::Put);
    world.faulty.next(Op::Put, &[Some(Kind::Slow(Duration::from_millis(500)))]);
    std::thread::scope(|scope| {
        let sweep = scope.spawn(|| world.runtime.block_on(world.cold.sweep()));
        world.until("a pack is on its way", || world.faulty.asked(Op::Put) > before);
        let target = Target::Keys { column: None, keys: vec![key(PUT.start)] };
        world.runtime.block_on(async {
            let mut deleting = world.cold.delete(world.namespace, &target).await;
            deleting.tell(PATIENCE).await;
            deleting.told().unwrap();
        });
        // Whatever it says, it names nothing.
        let _ = sweep.join().unwrap();
    });
    assert_eq!(world.count("spilled_blocks"), 0);
    assert!(!PUT.into_iter().any(|block| is_named(&world, block)));
}

#[test]
fn what_is_being_deleted_when_a_sweep_begins_is_not_copied_and_other_blocks_are() {
    let all = swept(&filled(|_| {}, None));
    let world = filled(|_| {}, None);
    let target = Target::Keys { column: None, keys: vec![key(PUT.start + 1)] };
    let mut deleting = world.runtime.block_on(world.cold.delete(world.namespace, &target));
    world.runtime.block_on(deleting.tell(PATIENCE));
    deleting.told().unwrap();
    assert_eq!(swept(&world), all - 1, "the store has not deleted yet");
    assert!(!is_named(&world, PUT.start + 1) && is_named(&world, PUT.start));
    assert_eq!(world.count("let_go_blocks"), 0);
    drop(deleting);
    assert_eq!(swept(&world), all - 1, "little of a namespace is not copied again");
}

#[test]
fn a_push_that_is_asked_for_copies_all_that_the_store_has_whatever_it_is_worth() {
    let world = filled(|config| (config.uses, config.age) = (3, Duration::from_secs(3600)), None);
    let all = PUT.end - PUT.start;
    assert_eq!(swept(&world), 0, "to a sweep it is worth nothing");
    let push = |only| world.runtime.block_on(world.cold.push(only)).unwrap();
    assert_eq!(push(Some(NamespaceId([9; 32]))).pushed.blocks, 0);
    let copied = push(None);
    let counts =
        |copied: &kvarts_server::cold::Copied| (copied.pushed.blocks, copied.already_there, copied.unread);
    assert_eq!((counts(&copied), &copied.problems), ((all, 0, 0), &vec![]));
    assert!(PUT.into_iter().all(|block| is_named(&world, block)));
    assert_eq!(counts(&push(Some(world.namespace))), (0, all, 0));
}

#[test]
fn what_is_deleted_while_a_push_has_it_is_not_named() {
    let world = filled(|_| {}, None);
    let before = world.faulty.asked(Op::Put);
    world.faulty.next(Op::Put, &[Some(Kind::Slow(Duration::from_millis(500)))]);
    std::thread::scope(|scope| {
        let push = scope.spawn(|| world.runtime.block_on(world.cold.push(None)));
        world.until("a pack is on its way", || world.faulty.asked(Op::Put) > before);
        let target = Target::Keys { column: None, keys: vec![key(PUT.start)] };
        world.runtime.block_on(async {
            let mut deleting = world.cold.delete(world.namespace, &target).await;
            let request = DeleteRequest { namespace: world.namespace, target, deadline: None };
            world.store().delete(request).await.unwrap().unwrap();
            deleting.tell(PATIENCE).await;
            deleting.told().unwrap();
        });
        let copied = push.join().unwrap().unwrap();
        assert!(copied.unread > 0, "the pack that had it is left out: {copied:?}");
    });
    assert!(!is_named(&world, PUT.start));
    // The next one copies the rest.
    world.runtime.block_on(world.cold.push(None)).unwrap();
    assert!(!is_named(&world, PUT.start) && PUT.skip(1).all(|block| is_named(&world, block)));
}

#[test]
fn into_a_bucket_that_ignores_conditions_nothing_is_copied_and_deletes_are_refused() {
    let world = filled(|_| {}, None);
    world.faulty.conditional(Conditional::Ignored);
    assert!(matches!(world.runtime.block_on(world.cold.push(None)), Err(ColdError::ReadOnly(_))));
    assert!(world.cold.read_only().is_some() && world.cold.counted().is_read_only);
    let puts = world.faulty.asked(Op::Put);
    assert!(world.runtime.block_on(world.cold.sweep()).is_err());
    assert_eq!(world.faulty.asked(Op::Put), puts, "no pack is put for nothing");
    let mut deleting = world.runtime.block_on(world.cold.delete(world.namespace, &Target::Namespace));
    world.runtime.block_on(deleting.tell(PATIENCE));
    let told = deleting.told().unwrap_err().to_string();
    assert!(told.contains("read-only for kvarts"), "{told}");
    drop(deleting);
    assert_eq!(world.read(&[0, 1, 2], Order::Blocks).0.len(), 3, "it is read as before");
}

/// Changes the manifest of a world's namespace as another program does.
fn change(world: &World, change: impl FnMut(&mut Manifest)) {
    let bucket = Arc::clone(&world.gate) as Arc<dyn Bucket>;
    let access = Access::new(bucket, Arc::new(TokioTime::start()), Limits::default(), 3);
    let tier = Tier::new(access, TierOptions::default());
    let mut change = change;
    let changed = tier.change(world.namespace, |manifest| {
        change(manifest);
        Ok(Some(()))
    });
    world.runtime.block_on(changed).unwrap();
}

/// A store with [`PUT`] and blocks of 128 KiB of another namespace, whose id is given: both are in what goes next.
fn filled_with_others() -> (World, NamespaceId) {
    let mut setting =
        Setting { layer_bytes: 64 << 10, blocks: 32, segment_bytes: 1 << 20, ..Setting::default() };
    setting.config.refresh = Duration::from_millis(50);
    let world = World::with("cold-spill-two", setting);
    let model = Model::new(32 << 10);
    world.store().register(&model.identity, &model.geometry).unwrap();
    let each = model.shape.block_bytes();
    for first in PUT.step_by(4) {
        world.put(first..first + 4, None);
        let memory = BufMut::zeroed((each * 4) as usize).unwrap().share();
        for block in 0..4 {
            memory.copy_in((each * block) as usize, &content(first + block, each));
        }
        let from = Placed::blocks(&model.shape, memory, 4).unwrap();
        let keys = (first..first + 4).map(key).collect();
        let request = PutRequest::new(model.namespace, GROUP, WHOLE, keys, from);
        world.runtime.block_on(world.store().put(request)).unwrap().unwrap();
    }
    (world, model.namespace)
}

#[test]
fn a_full_namespace_is_let_go_and_counted_once_and_other_namespaces_are_copied() {
    let (world, others) = filled_with_others();
    change(&world, |manifest| {
        let entry = manifest.packs.values().next().unwrap().clone();
        for pack in 0u32.. {
            if !manifest.has_room(entry.filter.len()) {
                break;
            }
            let mut id = [7; 32];
            id[..4].copy_from_slice(&pack.to_be_bytes());
            manifest.packs.insert(PackId(id), entry.clone());
        }
    });
    world.until("it is known to be full", || {
        world.cold.known(world.namespace).is_some_and(|known| !known.manifest.has_room(1))
    });
    let before = world.faulty.asked(Op::Put);
    let copied = swept(&world);
    assert!(copied > 0);
    assert_eq!(world.faulty.asked(Op::Put) - before, 2, "a pack of the other namespace, and its index");
    assert!(world.cold.known(others).is_some_and(|known| known.manifest.packs.len() == 1));
    assert!(!PUT.into_iter().any(|block| is_named(&world, block)));
    let let_go = world.count("let_go_blocks");
    assert!(let_go >= 3, "{let_go}");
    assert_eq!((swept(&world), world.count("let_go_blocks")), (copied, let_go));
}

#[test]
fn a_namespace_whose_manifest_is_damaged_does_not_keep_others_from_being_copied() {
    let (world, others) = filled_with_others();
    let name = names::manifest(world.namespace);
    let damage = world.gate.put(&name, vec![Bytes::from_static(b"nothing")], Condition::Any);
    world.runtime.block_on(damage).unwrap();
    world.until("it is known to be damaged", || {
        world.cold.touch(world.namespace);
        world.count("manifest_failures") > 0
    });
    assert!(swept(&world) > 0);
    assert!(world.cold.known(others).is_some_and(|known| known.manifest.packs.len() == 1));
}

#[test]
fn an_object_that_is_forbidden_does_not_keep_other_namespaces_from_being_copied() {
    let (world, _) = filled_with_others();
    // Conditions are tried with the first two: the first manifest that is changed is of one of the two namespaces.
    world.faulty.next(Op::Swap, &[None, None, Some(Kind::Forbidden)]);
    assert!(swept(&world) > 0, "the namespace behind it");
    assert!(world.count("let_go_blocks") > 0);
}

#[test]
fn what_cannot_be_read_or_written_is_let_go_and_counted() {
    let all = swept(&filled(|_| {}, None));
    let world = filled(|config| config.written = 64 << 10, None);
    assert!(world.runtime.block_on(world.cold.sweep()).is_err());
    assert_eq!((world.count("spilled_blocks"), world.count("let_go_blocks")), (0, all));
    assert!(world.cold.counted().today.written_bytes <= 64 << 10);
    // A block that is damaged on disk.
    let world = filled(|_| {}, None);
    flip(world.directory(), &content(PUT.start + 1, world.shape.block_bytes())[..64]);
    assert_eq!(swept(&world), all - 1);
    assert_eq!(world.count("let_go_blocks"), 1);
    assert!(!is_named(&world, PUT.start + 1));
    world.faulty.plan(Plan::default());
}

/// Flips a bit of the first file below a directory that has these bytes.
fn flip(directory: &std::path::Path, needle: &[u8]) {
    use std::os::unix::fs::FileExt;
    let mut left = vec![directory.to_owned()];
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let Ok(bytes) = std::fs::read(&path) else { continue };
        if let Some(at) = bytes.windows(needle.len()).position(|window| window == needle) {
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.write_all_at(&[bytes[at] ^ 1], at as u64).unwrap();
            file.sync_all().unwrap();
            return;
        }
    }
    panic!("the block is not on disk");
}
