//! Layers that read what another layer keeps: which parts, and that a layer before them keeps those.
//!
//! What is read takes no bytes, so it is a description and not geometry: a part is stored once, by the layer that keeps
//! it, however many layers read it.

use std::collections::BTreeSet;

use super::fault::{FormError, FormFault, at};
use super::limits::MAX_PARTS_PER_LAYER;
use super::{LayerKind, Part, SpecError};

/// Gives layer kinds what they read, and checks each against the layers in execution order.
pub(super) fn link(
    reads: &[(String, Vec<String>)],
    parts: &[Part],
    kinds: &mut [LayerKind],
    layers: &[u16],
) -> Result<(), FormError> {
    for (name, wanted) in reads {
        let key = format!("reads.{name}");
        let Some(kind) = kinds.iter_mut().find(|kind| kind.name == *name) else {
            return Err(at(key, FormFault::Undefined(name.clone())));
        };
        if wanted.is_empty() || wanted.len() > MAX_PARTS_PER_LAYER {
            return Err(at(key, FormFault::Spec(SpecError::LayerParts { layer: 0 })));
        }
        for part in wanted {
            let place = parts.iter().position(|known| known.name == *part);
            let Some(place) = place.and_then(|place| u16::try_from(place).ok()) else {
                return Err(at(key, FormFault::Undefined(part.clone())));
            };
            if kind.reads.contains(&place) {
                return Err(at(key, FormFault::Twice(part.clone())));
            }
            kind.reads.push(place);
        }
    }
    check_sources(parts, kinds, layers)
}

fn check_sources(parts: &[Part], kinds: &[LayerKind], layers: &[u16]) -> Result<(), FormError> {
    let mut kept: BTreeSet<u16> = BTreeSet::new();
    for kind in layers.iter().filter_map(|&kind| kinds.get(usize::from(kind))) {
        let lacking = kind.reads.iter().find(|part| kind.parts.contains(part) || !kept.contains(part));
        if let Some(part) = lacking.and_then(|&part| parts.get(usize::from(part))) {
            return Err(at(format!("reads.{}", kind.name), FormFault::NoSource(part.name.clone())));
        }
        kept.extend(&kind.parts);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::spec::ModelSpec;

    const SPEC: &str = r#"
        name = "sources"
        source = "a test"
        block_tokens = 16
        layers = [{ of = ["source", "reader"] }, { repeat = 3, of = ["reader"] }]
        [layer]
        source = ["kv", "window"]
        reader = ["window"]
        [reads]
        reader = ["kv"]
        [part.kv]
        kind = "dense_kv"
        role = "stream"
        bytes = 64
        dtype = "bf16"
        [part.window]
        kind = "swa_window"
        role = "window"
        bytes = 8
        window_tokens = 4
        dtype = "bf16"
    "#;

    fn refusal(spec: &str) -> String {
        ModelSpec::parse(spec).unwrap_err().to_string()
    }

    #[test]
    fn what_is_read_is_counted_once_and_written_down_again() {
        let spec = ModelSpec::parse(SPEC).unwrap();
        assert_eq!((spec.layers_by_part(), spec.readers_by_part()), (vec![1, 5], vec![4, 0]));
        assert_eq!(spec.geometry().stream_bytes_per_token(16).unwrap().whole(), Some(64));
        assert_eq!(spec.geometry().boundary_bytes(16), Ok(5 * 32));
        assert_eq!(ModelSpec::parse(&spec.to_toml()), Ok(spec.clone()));
        let alone = ModelSpec::parse(&SPEC.replace("[reads]\n        reader = [\"kv\"]", "")).unwrap();
        assert_eq!(spec.fingerprint(), alone.fingerprint(), "what is read moves no bytes");
        assert_ne!(spec, alone);
    }

    #[test]
    fn a_layer_reads_only_what_a_layer_before_it_keeps() {
        let first = SPEC.replace("[\"source\", \"reader\"] }", "[\"reader\", \"source\"] }");
        assert_eq!(
            refusal(&first),
            "reads.reader: this kind of layer must not read `kv`: a layer can read `kv` only if an earlier layer stores `kv` and the layer itself does not"
        );
        let own = SPEC.replace("reader = [\"kv\"]", "reader = [\"window\"]");
        assert!(
            refusal(&own).starts_with("reads.reader: this kind of layer must not read `window`"),
            "{}",
            refusal(&own)
        );
        let none = SPEC.replace("reader = [\"kv\"]", "reader = [\"keys\"]");
        assert_eq!(refusal(&none), "reads.reader: `keys` is not defined");
        let unknown = SPEC.replace("reader = [\"kv\"]", "writer = [\"kv\"]");
        assert_eq!(refusal(&unknown), "reads.writer: `writer` is not defined");
        let twice = SPEC.replace("reader = [\"kv\"]", "reader = [\"kv\", \"kv\"]");
        assert_eq!(refusal(&twice), "reads.reader: the list has `kv` twice");
        let empty = SPEC.replace("reader = [\"kv\"]", "reader = []");
        assert!(refusal(&empty).starts_with("reads.reader: "), "{}", refusal(&empty));
    }
}
