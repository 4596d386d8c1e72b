//! The bytes on disk do not change by accident, and no bit of them can change unnoticed.
//!
//! `KVARTS_BLESS=1 cargo test -p kvarts-layout golden` rewrites the files; that is a change of the format.

use std::sync::LazyLock;

use proptest::prelude::*;

use super::checkpoint::{CheckpointHeader, CheckpointReader};
use super::footer::Footer;
use super::record;
use super::samples;
use super::segment::SegmentHeader;
use super::superblock::Superblock;
use super::trailer::Trailer;
use super::*;

/// Decodes an image where it belongs; the value's debug form, so that values can be compared.
type Decode = fn(&[u8]) -> Result<String, Unsound>;

fn text<T: std::fmt::Debug>(value: T) -> String {
    format!("{value:?}")
}

fn decode_superblock(image: &[u8]) -> Result<String, Unsound> {
    Superblock::decode(image, 0, Some(samples::STORE)).map(text)
}

fn decode_segment_header(image: &[u8]) -> Result<String, Unsound> {
    SegmentHeader::decode(image, &samples::position(0), &samples::secret()).map(text)
}

fn decode_record(image: &[u8]) -> Result<String, Unsound> {
    let record = record::open(image, &samples::position(8192), &samples::secret())?;
    Ok(text((record.prefix, record.body()?, record.digests().collect::<Vec<_>>())))
}

fn decode_footer(image: &[u8]) -> Result<String, Unsound> {
    Footer::decode(image, &samples::footer_image().0, &samples::secret()).map(text)
}

fn decode_trailer(image: &[u8]) -> Result<String, Unsound> {
    Trailer::decode(image, &samples::trailer().0, &samples::secret()).map(text)
}

fn decode_checkpoint_header(image: &[u8]) -> Result<String, Unsound> {
    let expected = samples::checkpoint_header().position.under(0);
    CheckpointHeader::decode(image, &expected, &samples::secret()).map(text)
}

/// The third chunk, behind the first two.
fn decode_checkpoint_chunk(image: &[u8]) -> Result<String, Unsound> {
    static PAGES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(samples::checkpoint);
    let mut reader = CheckpointReader::new(&samples::checkpoint_header(), &samples::secret());
    for page in &PAGES[1..3] {
        reader.chunk(page)?;
    }
    reader.chunk(image).map(text)
}

#[derive(Clone)]
struct Golden {
    name: &'static str,
    structure: Structure,
    image: Vec<u8>,
    decode: Decode,
}

fn goldens() -> Vec<Golden> {
    static GOLDENS: LazyLock<Vec<Golden>> = LazyLock::new(make_goldens);
    GOLDENS.clone()
}

fn make_goldens() -> Vec<Golden> {
    let golden = |name, structure, image, decode: Decode| Golden { name, structure, image, decode };
    let trailer = samples::trailer();
    let checkpoint = samples::checkpoint();
    let superblock = samples::superblock().encode(0).unwrap();
    vec![
        golden("superblock", Structure::Superblock, superblock, decode_superblock),
        golden(
            "segment-header",
            Structure::SegmentHeader,
            samples::segment_header().encode().unwrap(),
            decode_segment_header,
        ),
        golden("record", Structure::Record, samples::record().1, decode_record),
        golden("footer", Structure::Footer, samples::footer_image().1, decode_footer),
        golden(
            "trailer",
            Structure::Trailer,
            trailer.1.encode(&trailer.0, &samples::secret()).unwrap(),
            decode_trailer,
        ),
        golden(
            "checkpoint-header",
            Structure::CheckpointHeader,
            checkpoint[0].clone(),
            decode_checkpoint_header,
        ),
        golden(
            "checkpoint-chunk",
            Structure::CheckpointChunk,
            checkpoint[3].clone(),
            decode_checkpoint_chunk,
        ),
    ]
}

#[allow(clippy::disallowed_methods, reason = "a test reads its own fixtures")]
fn compare_with_file(name: &str, image: &[u8]) {
    let path = format!("{}/testdata/{name}.bin", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("KVARTS_BLESS").is_some() {
        std::fs::write(&path, image).unwrap();
    }
    let golden = std::fs::read(&path).unwrap();
    let differs = golden.iter().zip(image).position(|(golden, image)| golden != image);
    assert_eq!((golden.len(), differs), (image.len(), None), "{name} changed on disk");
}

#[test]
fn golden_bytes_are_what_is_written() {
    for golden in goldens() {
        compare_with_file(golden.name, &golden.image);
    }
    for (number, (body, digests, payload_bytes)) in samples::bodies().into_iter().enumerate().skip(1) {
        let fields = record::Fields { payload_bytes, ..samples::fields() };
        let at = samples::position(8192);
        let image = record::encode(&at, &samples::secret(), &fields, &body, &digests).unwrap();
        compare_with_file(&format!("record-{number}"), &image);
    }
    compare_with_file("checkpoint", &samples::checkpoint().concat());
}

#[test]
fn every_flipped_bit_of_every_structure_is_noticed() {
    for Golden { name, mut image, decode, .. } in goldens() {
        let original = decode(&image).unwrap();
        for bit in 0..image.len() * 8 {
            image[bit / 8] ^= 1 << (bit % 8);
            let found = decode(&image);
            assert!(found.is_err(), "{name}: bit {bit} makes {found:?}");
            image[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(decode(&image), Ok(original));
    }
}

#[test]
fn every_sector_zeroed_or_replaced_is_noticed() {
    for Golden { name, image, decode, .. } in goldens() {
        for start in (0..image.len()).step_by(SECTOR) {
            for fill in [0x00, 0xff, 0x4b] {
                let mut damaged = image.clone();
                damaged[start..start + SECTOR].fill(fill);
                if damaged != image {
                    assert!(decode(&damaged).is_err(), "{name}: sector at {start} filled with {fill:#x}");
                }
            }
        }
    }
}

#[test]
fn one_structure_is_never_taken_for_another() {
    for (i, one) in goldens().into_iter().enumerate() {
        for (j, other) in goldens().into_iter().enumerate() {
            assert_eq!((other.decode)(&one.image).is_ok(), i == j, "{} as {}", one.name, other.name);
        }
        assert_eq!(seal::claimed_structure(&one.image), Some(one.structure));
    }
}

#[test]
fn a_writers_mistake_in_padding_is_noticed_behind_a_valid_tag() {
    for Golden { name, structure, mut image, decode } in goldens() {
        let position = seal::claimed_position(&image).unwrap();
        assert_eq!(decode(&image).map(|_| ()), Ok(()), "{name}");
        *image.last_mut().unwrap() = 1;
        seal::reseal(structure, &mut image, &position, &samples::secret());
        assert_eq!(decode(&image), Err(Unsound::Damaged { what: Damage::Padding }), "{name}");
    }
}

#[test]
fn a_newer_version_is_refused_by_name() {
    for Golden { name, structure, mut image, decode } in goldens() {
        let position = seal::claimed_position(&image).unwrap();
        seal::FORMAT_VERSION.put(&mut image, 7u16.to_le_bytes());
        seal::reseal(structure, &mut image, &position, &samples::secret());
        assert_eq!(decode(&image), Err(Unsound::Newer { version: 7 }), "{name}");
    }
}

#[test]
fn a_version_that_was_never_frozen_is_refused_by_name() {
    for Golden { name, structure, mut image, decode } in goldens() {
        let position = seal::claimed_position(&image).unwrap();
        seal::FORMAT_VERSION.put(&mut image, 0u16.to_le_bytes());
        seal::reseal(structure, &mut image, &position, &samples::secret());
        assert_eq!(decode(&image), Err(Unsound::Older { version: 0 }), "{name}");
    }
}

#[test]
fn a_cut_image_is_never_accepted() {
    for Golden { name, image, decode, .. } in goldens() {
        for bytes in (0..image.len()).step_by(61).chain([image.len() - 1]) {
            assert!(decode(&image[..bytes]).is_err(), "{name} cut to {bytes} bytes");
        }
    }
}

/// A golden image with some bytes changed, inserted or cut.
fn mutated() -> impl Strategy<Value = (usize, Vec<u8>)> {
    let edits = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12);
    let near = prop::collection::vec((72usize..700, any::<u8>()), 0..12);
    let cut = prop::option::of(any::<prop::sample::Index>());
    (0usize..7, edits, near, cut).prop_map(|(which, edits, near, cut)| {
        let mut image = goldens().swap_remove(which).image;
        for (at, value) in edits {
            let at = at.index(image.len());
            image[at] = value;
        }
        for (at, value) in near {
            image[at] = value;
        }
        if let Some(cut) = cut {
            image.truncate(cut.index(image.len()));
        }
        (which, image)
    })
}

proptest! {
    #[test]
    fn random_bytes_are_never_accepted_and_never_panic(data in prop::collection::vec(any::<u8>(), 0..9000)) {
        for (structure, target) in fuzz::TARGETS {
            target(&data);
            let mut named = data.clone();
            seal::MAGIC.put(&mut named, structure.magic());
            target(&named);
        }
        fuzz::fuzz_names(&data);
        for golden in goldens() {
            let found = (golden.decode)(&data);
            prop_assert!(found.is_err(), "{found:?}");
        }
    }

    #[test]
    fn mutated_structures_never_panic_whole_or_resealed((which, image) in mutated()) {
        let (_, target) = fuzz::TARGETS[which];
        target(&image);
    }

    #[test]
    fn what_a_resealed_record_decodes_to_can_be_written_again((_, image) in mutated()) {
        let image = fuzz::sealed(Structure::Record, &image);
        let Ok(record) = record::open(&image, &fuzz::POSITION, &fuzz::SECRET) else { return Ok(()) };
        let Ok(body) = record.body() else { return Ok(()) };
        if matches!(body, record::Body::Unknown(_)) || record.prefix.digest_algorithm > record::DIGEST_CRC32 {
            return Ok(());
        }
        let prefix = record.prefix;
        let fields = record::Fields {
            sequence: prefix.sequence,
            durable_upto: prefix.durable_upto,
            payload_bytes: prefix.payload_bytes,
        };
        let digests: Vec<u32> = record.digests().collect();
        let again = record::encode(&fuzz::POSITION, &fuzz::SECRET, &fields, &body, &digests).unwrap();
        let again = record::open(&again, &fuzz::POSITION, &fuzz::SECRET).unwrap();
        prop_assert_eq!(again.body(), Ok(body));
        prop_assert_eq!(again.digests().collect::<Vec<_>>(), digests);
    }
}

#[test]
fn resealing_reaches_the_code_behind_the_tag() {
    for golden in goldens() {
        if golden.structure == Structure::Record {
            let image = fuzz::sealed(Structure::Record, &golden.image);
            let record = record::open(&image, &fuzz::POSITION, &fuzz::SECRET).unwrap();
            assert!(record.body().is_ok());
        }
    }
}
