//! The contract's small structures as validated types of the engine, and back. Each is checked here and nowhere
//! else; what cannot be is refused with the name of the field.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use bytes::Bytes;
use kvarts_contract::api::{BlockOutcome, ReadEnd};
use kvarts_contract::error::Reason;
use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::prefix::{Absence, Boundary, Need, Requirement};
use kvarts_layout::spec::{Kind, PartGeometry, Role, shipped};
use kvarts_layout::{
    BlockKey, BlockShape, Coordinate, Fingerprint, Geometry, Group, Identity, ModelSpec, NamespaceId,
    OriginId, Requirements,
};

use super::fault::{self, Fault, Outcome};
use super::limits;
use crate::proto;

/// A namespace id.
pub fn namespace(bytes: &[u8]) -> Outcome<NamespaceId> {
    let id = <[u8; 32]>::try_from(bytes);
    id.map(NamespaceId)
        .map_err(|_| Fault::malformed(format!("namespace: {} bytes instead of 32", bytes.len())))
}

/// Keys that stand one after the other.
pub fn keys(bytes: &[u8]) -> Outcome<Vec<BlockKey>> {
    let (keys, rest) = bytes.as_chunks::<32>();
    if !rest.is_empty() {
        return Err(Fault::malformed(format!("keys: {} bytes, not a multiple of 32", bytes.len())));
    }
    if keys.len() > limits::KEYS_MAX {
        return Err(Reason::TooMany("blocks").into());
    }
    Ok(keys.iter().copied().map(BlockKey).collect())
}

/// Keys, one after the other.
pub fn key_bytes(keys: &[BlockKey]) -> Bytes {
    let mut bytes = Vec::with_capacity(keys.len().saturating_mul(32));
    keys.iter().for_each(|key| bytes.extend_from_slice(&key.0));
    bytes.into()
}

/// Origins that stand one after the other; none if there are no bytes.
pub fn origins(bytes: &[u8]) -> Outcome<Option<Vec<OriginId>>> {
    let (origins, rest) = bytes.as_chunks::<16>();
    if !rest.is_empty() {
        return Err(Fault::malformed(format!("origins: {} bytes, not a multiple of 16", bytes.len())));
    }
    Ok((!origins.is_empty()).then(|| origins.iter().copied().map(OriginId).collect()))
}

/// A coordinate; absent or zero is replicated.
pub fn coordinate(wire: Option<&proto::Coordinate>) -> Outcome<Coordinate> {
    let Some(&proto::Coordinate { start, count, of }) = wire else { return Ok(Coordinate::Replicated) };
    if (start, count, of) == (0, 0, 0) {
        return Ok(Coordinate::Replicated);
    }
    let narrow = |number: u32| u16::try_from(number).ok();
    let heads = || Coordinate::heads(narrow(start)?, narrow(count)?, narrow(of)?);
    heads().ok_or_else(|| {
        Fault::malformed(format!(
            "coordinate: {count} heads from head {start} are not a valid range \
            of {of} heads"
        ))
    })
}

/// A coordinate on the wire.
pub fn wire_coordinate(coordinate: Coordinate) -> proto::Coordinate {
    match coordinate {
        Coordinate::Replicated => proto::Coordinate::default(),
        Coordinate::Heads { start, count, of } => {
            proto::Coordinate { start: start.into(), count: count.into(), of: of.into() }
        }
    }
}

/// Group and coordinate; absent is group 0, replicated.
pub fn column(wire: Option<&proto::Column>) -> Outcome<(Group, Coordinate)> {
    let group = wire.map_or(0, |column| column.group);
    Ok((Group(group), coordinate(wire.and_then(|column| column.coordinate.as_ref()))?))
}

/// Group and coordinate on the wire.
pub fn wire_column(group: Group, coordinate: Coordinate) -> proto::Column {
    proto::Column { group: group.0, coordinate: Some(wire_coordinate(coordinate)) }
}

/// A shape on the wire.
pub fn wire_shape(group: Group, coordinate: Coordinate, shape: &BlockShape) -> proto::Shape {
    let layer = |layer: &kvarts_layout::LayerShape| proto::shape::Layer {
        layer: layer.layer,
        chunk_bytes: layer.chunks.iter().map(|chunk| chunk.bytes).collect(),
    };
    proto::Shape {
        column: Some(wire_column(group, coordinate)),
        layers: shape.layers().iter().map(layer).collect(),
        block_bytes: shape.block_bytes(),
    }
}

/// A time that may be left out as 0, bounded.
pub fn hold(milliseconds: u64) -> Option<Duration> {
    (milliseconds > 0).then(|| Duration::from_millis(milliseconds).min(limits::LEASE_MAX))
}

/// An identity, whose salt is the server's to give. `fingerprint` stands in for one that was left out.
pub fn identity(wire: proto::Identity, salt: TenantSalt, fingerprint: Fingerprint) -> Outcome<Identity> {
    let spec_fingerprint = match &wire.spec_fingerprint[..] {
        [] => fingerprint,
        bytes => Fingerprint(
            <[u8; 32]>::try_from(bytes)
                .map_err(|_| Fault::malformed("identity.spec_fingerprint: 32 bytes are required"))?,
        ),
    };
    Ok(Identity {
        model: wire.model,
        revision: wire.revision,
        tokenizer: wire.tokenizer,
        adapter: wire.adapter,
        kv_dtype: wire.kv_dtype,
        quantisation: Quantisation { recipe: wire.quantisation_recipe, scales: wire.quantisation_scales },
        rope: wire.rope,
        window: wire.window,
        arrangement: Arrangement {
            engine: wire.arrangement_engine,
            layout: wire.arrangement_layout,
            version: wire.arrangement_version,
        },
        block_tokens: wire.block_tokens,
        spec_fingerprint,
        tenant_salt: salt,
        extras: wire.extras,
    })
}

/// An identity on the wire, without its salt.
pub fn wire_identity(identity: &Identity) -> proto::Identity {
    let extras: BTreeMap<_, _> = identity.extras.clone();
    proto::Identity {
        model: identity.model.clone(),
        revision: identity.revision.clone(),
        tokenizer: identity.tokenizer.clone(),
        adapter: identity.adapter.clone(),
        kv_dtype: identity.kv_dtype.clone(),
        quantisation_recipe: identity.quantisation.recipe.clone(),
        quantisation_scales: identity.quantisation.scales.clone(),
        rope: identity.rope.clone(),
        window: identity.window.clone(),
        arrangement_engine: identity.arrangement.engine.clone(),
        arrangement_layout: identity.arrangement.layout.clone(),
        arrangement_version: identity.arrangement.version.clone(),
        block_tokens: identity.block_tokens,
        spec_fingerprint: Bytes::copy_from_slice(identity.spec_fingerprint.as_bytes()),
        extras,
    }
}

/// What a registration says of the model's bytes.
pub fn geometry(spec: Option<proto::register_model_request::Spec>) -> Outcome<Geometry> {
    use proto::register_model_request::Spec;
    let fault = |error: &dyn std::fmt::Display| Fault::malformed(format!("spec: {error}"));
    match spec.ok_or_else(|| {
        Fault::malformed("spec: give a geometry, a spec as TOML, or the name of a shipped spec")
    })? {
        Spec::Geometry(geometry) => explicit_geometry(&geometry),
        Spec::Toml(text) => Ok(ModelSpec::parse(&text).map_err(|error| fault(&error))?.geometry().clone()),
        Spec::Shipped(name) => {
            let spec = shipped::load(&name);
            let spec =
                spec.ok_or_else(|| Fault::malformed(format!("spec: no shipped spec is named {name:?}")))?;
            Ok(spec.geometry().clone())
        }
        Spec::OpaquePageBytes(bytes) => Geometry::opaque(bytes).map_err(|error| fault(&error)),
    }
}

fn explicit_geometry(wire: &proto::Geometry) -> Outcome<Geometry> {
    let parts = wire.parts.iter().map(part).collect::<Outcome<Vec<_>>>()?;
    let narrow = |part: &u32| {
        u16::try_from(*part)
            .map_err(|_| Fault::malformed(format!("geometry.layers: part {part} does not exist")))
    };
    let layer = |layer: &proto::geometry::Layer| layer.parts.iter().map(narrow).collect::<Outcome<Vec<_>>>();
    let layers = wire.layers.iter().map(layer).collect::<Outcome<Vec<_>>>()?;
    Geometry::new(&parts, &layers).map_err(|error| Fault::malformed(format!("geometry: {error}")))
}

fn part(wire: &proto::Part) -> Outcome<PartGeometry> {
    use proto::part::Role as Wire;
    let role = match wire
        .role
        .as_ref()
        .ok_or_else(|| Fault::malformed("geometry.parts: a part has no role: give each part a role"))?
    {
        Wire::Stream(stream) => Role::Stream { bytes: stream.bytes, tokens: stream.tokens },
        Wire::Page(page) => Role::Page { bytes: page.bytes },
        Wire::Window(window) => Role::Window { bytes: window.bytes, tokens: window.tokens },
        Wire::State(state) => {
            let empty_at_multiple_of = NonZeroU32::new(state.empty_at_multiple_of);
            Role::State { bytes: state.bytes, empty_at_multiple_of }
        }
    };
    Ok(PartGeometry {
        kind: Kind::new(&wire.kind)
            .ok_or_else(|| Fault::malformed("geometry.parts.kind: the name of the kind is not valid"))?,
        role,
        heads: u16::try_from(wire.heads)
            .map_err(|_| Fault::malformed("geometry.parts.heads: the limit is 65535"))?,
        align: wire.align.max(1),
        group: Group(wire.group),
    })
}

/// A geometry on the wire.
pub fn wire_geometry(geometry: &Geometry) -> proto::Geometry {
    use proto::part::Role as Wire;
    let part = |part: &PartGeometry| proto::Part {
        kind: part.kind.to_string(),
        heads: part.heads.into(),
        align: part.align,
        group: part.group.0,
        role: Some(match part.role {
            Role::Stream { bytes, tokens } => Wire::Stream(proto::part::Stream { bytes, tokens }),
            Role::Page { bytes } => Wire::Page(proto::part::Page { bytes }),
            Role::Window { bytes, tokens } => Wire::Window(proto::part::Window { bytes, tokens }),
            Role::State { bytes, empty_at_multiple_of } => Wire::State(proto::part::State {
                bytes,
                empty_at_multiple_of: empty_at_multiple_of.map_or(0, NonZeroU32::get),
            }),
        }),
    };
    let layer =
        |layer: &Vec<u16>| proto::geometry::Layer { parts: layer.iter().map(|&part| part.into()).collect() };
    proto::Geometry {
        parts: geometry.parts().iter().map(part).collect(),
        layers: geometry.layers().iter().map(layer).collect(),
    }
}

/// What a prefix needs to be usable.
pub fn requirements(block_tokens: u32, wire: &[proto::Requirement]) -> Outcome<Requirements> {
    use proto::requirement::Need as Wire;
    let one = |wire: &proto::Requirement| -> Outcome<Requirement> {
        let coordinates = match &wire.coordinates[..] {
            [] => vec![Coordinate::Replicated],
            some => some.iter().map(|one| coordinate(Some(one))).collect::<Outcome<_>>()?,
        };
        let need = match wire.need {
            None | Some(Wire::AtBoundary(false)) => Need::All,
            Some(Wire::LastTokens(tokens)) => Need::Last { tokens },
            Some(Wire::AtBoundary(true)) => Need::At,
        };
        let absence = wire.recompute_tokens.map_or(Absence::Required, |tokens| Absence::Recompute { tokens });
        Ok(Requirement { group: Group(wire.group), coordinates, need, absence })
    };
    let groups = wire.iter().map(one).collect::<Outcome<Vec<_>>>()?;
    Requirements::new(block_tokens, groups)
        .map_err(|error| Fault::malformed(format!("requirements: {error}")))
}

/// Requirements on the wire.
pub fn wire_requirements(requirements: &Requirements) -> Vec<proto::Requirement> {
    use proto::requirement::Need as Wire;
    let one = |one: &Requirement| proto::Requirement {
        group: one.group.0,
        coordinates: one.coordinates.iter().copied().map(wire_coordinate).collect(),
        need: match one.need {
            Need::All => None,
            Need::Last { tokens } => Some(Wire::LastTokens(tokens)),
            Need::At => Some(Wire::AtBoundary(true)),
        },
        recompute_tokens: match one.absence {
            Absence::Required => None,
            Absence::Recompute { tokens } => Some(tokens),
        },
    };
    requirements.groups().iter().map(one).collect()
}

/// A boundary on the wire.
pub fn wire_boundary(boundary: &Boundary) -> proto::Boundary {
    let recompute = |one: &kvarts_layout::prefix::Recompute| proto::boundary::Recompute {
        group: one.group.0,
        tokens: one.tokens,
    };
    proto::Boundary {
        blocks: boundary.blocks,
        tokens: boundary.tokens,
        recompute: boundary.recompute.iter().map(recompute).collect(),
        recompute_tokens: boundary.recompute_tokens,
    }
}

/// A boundary from the wire.
pub fn boundary(wire: Option<proto::Boundary>) -> Boundary {
    let wire = wire.unwrap_or_default();
    let recompute = |one: &proto::boundary::Recompute| kvarts_layout::prefix::Recompute {
        group: Group(one.group),
        tokens: one.tokens,
    };
    Boundary {
        blocks: wire.blocks,
        tokens: wire.tokens,
        recompute: wire.recompute.iter().map(recompute).collect(),
        recompute_tokens: wire.recompute_tokens,
    }
}

/// The end of a read on the wire.
pub fn wire_end(end: &ReadEnd) -> proto::ReadEnd {
    let mut told = fault::Told::default();
    let failure = |(block, reason): &(u32, Reason)| proto::read_end::Failure {
        block: *block,
        error: Some(told.detail(reason)),
    };
    proto::ReadEnd {
        usable_blocks: end.usable_blocks,
        usable_layers: end.usable_layers,
        failures: end.failures.iter().map(failure).collect(),
    }
}

/// What became of the blocks of a put, on the wire.
pub fn wire_outcomes(outcomes: &[BlockOutcome]) -> Vec<proto::PutOutcome> {
    use proto::put_outcome::What;
    let mut told = fault::Told::default();
    let one = |outcome: &BlockOutcome| {
        let (what, error) = match outcome {
            BlockOutcome::Stored => (What::Stored, None),
            BlockOutcome::AlreadyThere => (What::AlreadyThere, None),
            BlockOutcome::InFlight => (What::InFlight, None),
            BlockOutcome::HeldElsewhere => (What::HeldElsewhere, None),
            BlockOutcome::Refused(reason) => (What::Refused, Some(told.detail(reason))),
        };
        proto::PutOutcome { what: what.into(), error }
    };
    outcomes.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_coordinate_is_refused_and_nothing_is_replicated() {
        let heads = |start, count, of| coordinate(Some(&proto::Coordinate { start, count, of }));
        assert_eq!(coordinate(None).unwrap(), Coordinate::Replicated);
        assert_eq!(heads(0, 0, 0).unwrap(), Coordinate::Replicated);
        assert_eq!(heads(2, 2, 8).unwrap(), Coordinate::heads(2, 2, 8).unwrap());
        for (start, count, of) in [(0, 0, 8), (7, 2, 8), (u32::MAX, 1, 8), (0, 65_536, 65_536), (1, 0, 0)] {
            assert!(heads(start, count, of).is_err(), "{start}+{count}/{of}");
        }
    }

    #[test]
    fn keys_are_whole_and_bounded() {
        assert_eq!(keys(&[]).unwrap(), vec![]);
        assert_eq!(keys(&[3; 64]).unwrap(), vec![BlockKey([3; 32]); 2]);
        assert!(keys(&[3; 33]).is_err() && namespace(&[3; 31]).is_err() && origins(&[3; 15]).is_err());
        assert!(keys(&vec![0; 32 * limits::KEYS_MAX]).is_ok());
        assert!(keys(&vec![0; 32 * (limits::KEYS_MAX + 1)]).is_err());
    }

    #[test]
    fn requirements_and_geometries_come_back_as_they_were() {
        for name in ["deepseek-v4-pro", "llama-3.1-70b"] {
            let spec = shipped::load(name).unwrap();
            let back = explicit_geometry(&wire_geometry(spec.geometry())).unwrap();
            assert_eq!(back.fingerprint(), spec.geometry().fingerprint());
        }
        let groups = vec![
            Requirement {
                group: Group(3),
                coordinates: vec![Coordinate::Replicated, Coordinate::heads(1, 1, 2).unwrap()],
                need: Need::Last { tokens: 128 },
                absence: Absence::Recompute { tokens: 7 },
            },
            Requirement {
                group: Group(4),
                coordinates: vec![Coordinate::Replicated],
                need: Need::At,
                absence: Absence::Required,
            },
        ];
        let there = Requirements::new(64, groups).unwrap();
        assert_eq!(requirements(64, &wire_requirements(&there)).unwrap(), there);
    }
}
