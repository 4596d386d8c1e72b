//! The bytes of an export do not change by accident, and no bit of them can change unnoticed.
//!
//! `KVARTS_BLESS=1 cargo test -p kvarts-layout export` writes the golden file anew; that is a change of the format.

use std::collections::BTreeMap;

use super::*;
use crate::format::body::Parent;
use crate::identity::{Arrangement, Quantisation, TenantSalt};
use crate::{BlockKey, ContentId, Coordinate, Group, OriginId};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/export.bin");

fn geometry() -> Geometry {
    Geometry::opaque(40).unwrap()
}

fn identity() -> Identity {
    let text = |text: &str| text.to_owned();
    Identity {
        model: text("small"),
        revision: text("r1"),
        tokenizer: text("none"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("none"),
        window: text("none"),
        arrangement: Arrangement { engine: text("test"), layout: text("flat"), version: text("1") },
        block_tokens: 16,
        spec_fingerprint: geometry().fingerprint(),
        tenant_salt: TenantSalt(vec![]),
        extras: BTreeMap::new(),
    }
}

fn payload() -> Vec<u8> {
    (0..120u8).map(|byte| byte.wrapping_mul(7) ^ 0x35).collect()
}

fn run() -> Run {
    let payload = payload();
    let blocks = (1u8..).zip(payload.chunks(40)).map(|(n, bytes)| ExportedBlock {
        key: BlockKey([n; 32]),
        origin: OriginId([n | 0x80; 16]),
        content: ContentId(*blake3::hash(bytes).as_bytes()),
        digests: vec![crc32fast::hash(bytes)],
    });
    Run {
        namespace: identity().namespace_id().unwrap(),
        coordinate: Coordinate::Replicated,
        group: Group(0),
        created_ms: 1_700_000_000_000,
        expires_ms: 0,
        first_block: Some(4),
        parent: Parent::Key([9; 32]),
        block_bytes: 40,
        blocks: blocks.collect(),
    }
}

fn export() -> Vec<u8> {
    let mut writing = Writing::new();
    [
        writing.begin(1_700_000_005_000).unwrap(),
        writing.spec(&geometry()).unwrap(),
        writing.identity(&identity()).unwrap(),
        writing.run(&run()).unwrap(),
        payload(),
        writing.end().unwrap(),
    ]
    .concat()
}

/// Everything that a reader gets out of bytes: frames and proven payloads, or why not.
fn read(bytes: &[u8]) -> Result<Vec<Frame>, String> {
    let mut reading = Reading::new();
    let mut rest = bytes;
    let mut frames = Vec::new();
    while !reading.has_ended() {
        let (head, behind) = rest.split_first_chunk::<HEAD_BYTES>().ok_or("cut short")?;
        let head = Head::decode(head).map_err(|error| error.to_string())?;
        let (body, behind) = behind.split_at_checked(head.body_bytes()).ok_or("cut short")?;
        let frame = reading.frame(&head, body).map_err(|error| error.to_string())?;
        let (payload, behind) = behind.split_at_checked(head.payload_bytes() as usize).ok_or("cut short")?;
        if let Frame::Run(run) = &frame {
            let shape = run.shape(reading.namespace(run.namespace).unwrap()).unwrap();
            for (at, bytes) in payload.chunks(run.block_bytes as usize).enumerate() {
                run.verify(at, &shape, bytes).map_err(|error| error.to_string())?;
            }
        }
        frames.push(frame);
        rest = behind;
    }
    if rest.is_empty() { Ok(frames) } else { Err("bytes behind the end".to_owned()) }
}

#[test]
fn an_export_says_what_was_written() {
    let frames = read(&export()).unwrap();
    let totals = Totals { specs: 1, identities: 1, runs: 1, blocks: 3, payload_bytes: 120 };
    let expected = [
        Frame::Begin(1_700_000_005_000),
        Frame::Spec(geometry().fingerprint()),
        Frame::Identity(identity().namespace_id().unwrap()),
        Frame::Run(Box::new(run())),
        Frame::End(totals),
    ];
    assert_eq!(frames, expected);
}

#[test]
#[allow(clippy::disallowed_methods, reason = "golden files")]
fn the_bytes_of_an_export_are_golden() {
    if std::env::var_os("KVARTS_BLESS").is_some() {
        std::fs::write(GOLDEN, export()).unwrap();
    }
    assert_eq!(std::fs::read(GOLDEN).unwrap(), export());
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed() {
    let sound = export();
    for at in 0..sound.len() {
        for bit in 0..8 {
            let mut flipped = sound.clone();
            flipped[at] ^= 1 << bit;
            assert!(read(&flipped).is_err(), "byte {at} bit {bit}");
        }
        assert!(read(&sound[..at]).is_err(), "cut at {at}");
    }
    assert!(read(&[sound.as_slice(), &[0]].concat()).is_err());
}

/// Where each frame begins, and where it ends with its payload.
fn frames(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let mut rest = bytes;
    while let Some((head, _)) = rest.split_first_chunk::<HEAD_BYTES>() {
        let head = Head::decode(head).unwrap();
        let (frame, behind) = rest.split_at(HEAD_BYTES + head.body_bytes() + head.payload_bytes() as usize);
        all.push(frame.to_vec());
        rest = behind;
    }
    all
}

#[test]
fn frames_that_are_lost_doubled_or_swapped_are_noticed() {
    let all = frames(&export());
    assert_eq!(all.len(), 5);
    for at in 0..all.len() {
        let lost: Vec<u8> =
            all.iter().enumerate().filter(|(n, _)| *n != at).flat_map(|(_, f)| f.clone()).collect();
        assert!(read(&lost).is_err(), "frame {at} lost");
        let mut doubled = all.clone();
        doubled.insert(at, all[at].clone());
        assert!(read(&doubled.concat()).is_err(), "frame {at} doubled");
        if at > 0 {
            let mut swapped = all.clone();
            swapped.swap(at - 1, at);
            assert!(read(&swapped.concat()).is_err(), "frame {at} swapped");
        }
    }
}

#[test]
fn what_would_not_decode_is_not_written() {
    let good = run();
    let mut many = good.clone();
    many.block_bytes = RUN_BYTES_MAX;
    let mut uneven = good.clone();
    uneven.blocks[1].digests.push(1);
    let foreign = Run { namespace: NamespaceId([7; 32]), ..good.clone() };
    let longer = Run { block_bytes: 41, ..good.clone() };
    let group = Run { group: Group(3), ..good.clone() };
    for bad in [Run { blocks: vec![], ..good.clone() }, many, uneven, foreign, longer, group] {
        let mut writing = Writing::new();
        writing.begin(0).unwrap();
        writing.spec(&geometry()).unwrap();
        writing.identity(&identity()).unwrap();
        let before = writing.totals();
        assert!(matches!(writing.run(&bad), Err(ExportError::Field(_))), "{bad:?}");
        assert_eq!(writing.totals(), before);
        writing.run(&good).unwrap();
    }
}

#[test]
fn definitions_come_before_what_needs_them_and_once() {
    let mut writing = Writing::new();
    assert!(writing.spec(&geometry()).is_err(), "nothing comes before the first frame");
    writing.begin(0).unwrap();
    assert!(writing.begin(0).is_err());
    assert!(writing.identity(&identity()).is_err(), "its spec is missing");
    writing.spec(&geometry()).unwrap();
    assert!(writing.run(&run()).is_err(), "its identity is missing");
    writing.identity(&identity()).unwrap();
    assert!(writing.identity(&identity()).is_err() && writing.spec(&geometry()).is_err());
    writing.end().unwrap();
    assert!(writing.run(&run()).is_err(), "nothing follows the last frame");
}

#[test]
fn a_newer_version_is_refused_politely() {
    let mut newer = export();
    newer[8] = 2;
    let error = Head::decode(newer.first_chunk().unwrap()).unwrap_err();
    assert_eq!(error, ExportError::Newer(2));
    assert!(error.to_string().contains("newer kvarts"));
}

proptest::proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic(data in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..600)) {
        fuzz_export(&data);
    }

    #[test]
    fn any_bytes_in_a_sound_run_are_read_without_a_panic(
        at in 0usize..400,
        patch in proptest::collection::vec(proptest::prelude::any::<u8>(), 1..40),
    ) {
        let mut body = run().encode().unwrap();
        let place = at % body.len();
        let end = body.len().min(place + patch.len());
        body.splice(place..end, patch);
        fuzz_export(&[&[4], body.as_slice()].concat());
    }
}
