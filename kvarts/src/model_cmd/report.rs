//! What `kvarts model show` says about a spec, as data: the fields are those of its JSON.
//!
//! Bytes of a part are over all its layers unless the field says `layer`, so that they add up: `bytes_per_token`
//! to `stream_bytes_per_token`, `boundary_bytes` to the model's `boundary_bytes`.

use kvarts_layout::coord::Coordinate;
use kvarts_layout::spec::{
    Absence, Geometry, GroupGeometry, ModelSpec, Part, Ratio, Role, RoleClass, SpecError,
};
use serde::{Serialize, Serializer};

use super::windows::{self, WindowsReport};

/// What is asked about a spec.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) tokens: u64,
    pub(crate) block_tokens: Option<u32>,
    pub(crate) ranks: Option<u16>,
}

impl Default for Question {
    fn default() -> Self {
        Self { tokens: 32_768, block_tokens: None, ranks: None }
    }
}

/// The answers.
#[derive(Serialize, Debug)]
pub(crate) struct Report {
    pub(crate) name: String,
    pub(crate) source: String,
    pub(crate) note: String,
    pub(crate) fingerprint: String,
    pub(crate) layers: usize,
    pub(crate) block_tokens: u32,
    /// Block tokens must be a multiple of this.
    pub(crate) entry_tokens: u32,
    #[serde(serialize_with = "decimal")]
    pub(crate) stream_bytes_per_token: Ratio,
    /// Stored at one boundary: windows and states.
    pub(crate) boundary_bytes: u64,
    /// Held by the engine at one moment for windows and states: more where a state is empty at boundaries.
    pub(crate) held_bytes: u64,
    pub(crate) tokens: u64,
    /// Streams of the whole blocks of `tokens` tokens.
    pub(crate) bytes_for_tokens: u64,
    /// The same with the windows and states of one boundary.
    pub(crate) restore_bytes_for_tokens: u64,
    pub(crate) blocks: u64,
    pub(crate) parts: Vec<PartReport>,
    pub(crate) groups: Vec<GroupReport>,
    /// What it costs to keep windows and states, by policy; empty where the model has none.
    pub(crate) windows: Vec<WindowsReport>,
    pub(crate) tp: Option<TpReport>,
}

/// The few answers of a list.
#[derive(Serialize, Debug)]
pub(crate) struct Summary<'a> {
    name: &'a str,
    layers: usize,
    block_tokens: u32,
    #[serde(serialize_with = "decimal")]
    stream_bytes_per_token: Ratio,
    boundary_bytes: u64,
    fingerprint: &'a str,
}

#[derive(Serialize, Debug)]
pub(crate) struct PartReport {
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) role: &'static str,
    pub(crate) group: u32,
    pub(crate) dtype: String,
    pub(crate) heads: u16,
    pub(crate) align: u32,
    pub(crate) layers: u64,
    /// Layers that read this part of a layer before them, and do not keep it.
    pub(crate) readers: u64,
    #[serde(serialize_with = "optional_decimal")]
    pub(crate) bytes_per_token: Option<Ratio>,
    /// One layer's chunk in one stored block.
    pub(crate) layer_bytes_per_block: u64,
    pub(crate) bytes_per_block: u64,
    pub(crate) boundary_bytes: u64,
    pub(crate) held_bytes: Option<u64>,
    pub(crate) window_tokens: Option<u32>,
    pub(crate) empty_at_multiple_of: Option<u32>,
    pub(crate) absence: &'static str,
    pub(crate) recompute_tokens: Option<u64>,
    pub(crate) note: String,
}

#[derive(Serialize, Debug)]
pub(crate) struct GroupReport {
    pub(crate) group: u32,
    pub(crate) class: &'static str,
    pub(crate) heads: u16,
    pub(crate) bytes_per_block: u64,
}

/// What each of a number of tensor-parallel ranks holds; all ranks hold equally much.
#[derive(Serialize, Debug)]
pub(crate) struct TpReport {
    pub(crate) ranks: u16,
    #[serde(serialize_with = "decimal")]
    pub(crate) stream_bytes_per_token: Ratio,
    pub(crate) boundary_bytes: u64,
    pub(crate) bytes_for_tokens: u64,
    pub(crate) groups: Vec<TpGroupReport>,
}

#[derive(Serialize, Debug)]
pub(crate) struct TpGroupReport {
    pub(crate) group: u32,
    pub(crate) class: &'static str,
    pub(crate) heads: u16,
    /// Ranks that hold the same bytes.
    pub(crate) ranks_per_coordinate: u64,
    pub(crate) bytes_per_block: u64,
    /// Each is stored once.
    pub(crate) coordinates: Vec<CoordinateReport>,
}

/// A coordinate with all its numbers: `start`, `count` and `of` are zero for a replicated one.
#[derive(Serialize, Debug)]
pub(crate) struct CoordinateReport {
    pub(crate) text: String,
    start: u16,
    count: u16,
    of: u16,
}

impl Report {
    pub(crate) fn new(spec: &ModelSpec, question: &Question) -> Result<Self, SpecError> {
        let geometry = spec.geometry();
        let block_tokens = question.block_tokens.unwrap_or(spec.default_block_tokens());
        let prefix = geometry.bytes_for_tokens(question.tokens, block_tokens)?;
        let parts = spec
            .parts()
            .iter()
            .zip(spec.layers_by_part().into_iter().zip(spec.readers_by_part()))
            .map(|(part, (layers, readers))| part_report(part, layers, readers, block_tokens))
            .collect::<Option<Vec<_>>>()
            .ok_or(SpecError::Overflow)?;
        let groups = geometry
            .groups()
            .iter()
            .map(|known| group_report(geometry, known, block_tokens))
            .collect::<Result<_, _>>()?;
        let boundary_bytes = geometry.boundary_bytes(block_tokens)?;
        let windows = windows::of(spec, block_tokens, prefix.blocks, boundary_bytes)?;
        let ranks = question.ranks.map(|ranks| tp_report(geometry, ranks, block_tokens, prefix.blocks));
        Ok(Self {
            name: spec.name().to_owned(),
            source: spec.source().to_owned(),
            note: spec.note().to_owned(),
            fingerprint: spec.fingerprint().to_string(),
            layers: geometry.layers().len(),
            block_tokens,
            entry_tokens: geometry.entry_tokens(),
            stream_bytes_per_token: geometry.stream_bytes_per_token(block_tokens)?,
            boundary_bytes,
            held_bytes: parts.iter().filter_map(|part| part.held_bytes).sum(),
            tokens: question.tokens,
            bytes_for_tokens: prefix.stream_bytes,
            restore_bytes_for_tokens: prefix
                .stream_bytes
                .checked_add(prefix.boundary_bytes)
                .ok_or(SpecError::Overflow)?,
            blocks: prefix.blocks,
            parts,
            groups,
            windows,
            tp: ranks.transpose()?,
        })
    }

    pub(crate) fn summary(&self) -> Summary<'_> {
        Summary {
            name: &self.name,
            layers: self.layers,
            block_tokens: self.block_tokens,
            stream_bytes_per_token: self.stream_bytes_per_token,
            boundary_bytes: self.boundary_bytes,
            fingerprint: &self.fingerprint,
        }
    }
}

fn part_report(part: &Part, layers: u64, readers: u64, block_tokens: u32) -> Option<PartReport> {
    let geometry = &part.geometry;
    let role = geometry.role;
    let layer_bytes = role.stored_bytes(block_tokens)?;
    let bytes_per_block = layer_bytes.checked_mul(layers)?;
    let is_boundary = role.class().is_boundary();
    let held_bytes = match role.held_bytes() {
        Some(bytes) => Some(bytes.checked_mul(layers)?),
        None => None,
    };
    let (absence, recompute_tokens) = match part.absence {
        Absence::Required => ("required", None),
        Absence::Recompute { tokens } => ("recompute", Some(tokens)),
    };
    Some(PartReport {
        name: part.name.clone(),
        kind: geometry.kind.to_string(),
        role: match role {
            Role::Page { .. } => "page",
            _ => role.class().name(),
        },
        group: geometry.group.0,
        dtype: part.dtype.clone(),
        heads: geometry.heads,
        align: geometry.align,
        layers,
        readers,
        bytes_per_token: if is_boundary { None } else { Ratio::new(bytes_per_block, block_tokens.into()) },
        layer_bytes_per_block: layer_bytes,
        bytes_per_block,
        boundary_bytes: if is_boundary { bytes_per_block } else { 0 },
        held_bytes,
        window_tokens: match role {
            Role::Window { tokens, .. } => Some(tokens),
            _ => None,
        },
        empty_at_multiple_of: match role {
            Role::State { empty_at_multiple_of, .. } => empty_at_multiple_of.map(|n| n.get()),
            _ => None,
        },
        absence,
        recompute_tokens,
        note: part.note.clone(),
    })
}

fn group_report(
    geometry: &Geometry,
    known: &GroupGeometry,
    block_tokens: u32,
) -> Result<GroupReport, SpecError> {
    Ok(GroupReport {
        group: known.group.0,
        class: known.class.name(),
        heads: known.heads,
        bytes_per_block: geometry.group_bytes(known.group, block_tokens)?,
    })
}

fn tp_report(geometry: &Geometry, ranks: u16, block_tokens: u32, blocks: u64) -> Result<TpReport, SpecError> {
    let mut groups = Vec::new();
    let (mut stream_block, mut boundary_bytes) = (0u64, 0u64);
    for known in geometry.groups() {
        let coordinates = geometry.coordinates(known.group, ranks)?;
        let rank = geometry.coordinate(known.group, ranks, 0)?;
        let bytes = match geometry.is_stored(known.group, block_tokens) {
            true => geometry.shape(known.group, rank, block_tokens)?.block_bytes(),
            false => 0,
        };
        let sum = if known.class == RoleClass::Stream { &mut stream_block } else { &mut boundary_bytes };
        *sum = sum.checked_add(bytes).ok_or(SpecError::Overflow)?;
        groups.push(TpGroupReport {
            group: known.group.0,
            class: known.class.name(),
            heads: known.heads,
            ranks_per_coordinate: u64::from(ranks) / (coordinates.len() as u64).max(1),
            bytes_per_block: bytes,
            coordinates: coordinates.into_iter().map(coordinate_report).collect(),
        });
    }
    Ok(TpReport {
        ranks,
        stream_bytes_per_token: Ratio::new(stream_block, block_tokens.into()).ok_or(SpecError::Overflow)?,
        boundary_bytes,
        bytes_for_tokens: stream_block.checked_mul(blocks).ok_or(SpecError::Overflow)?,
        groups,
    })
}

fn coordinate_report(coordinate: Coordinate) -> CoordinateReport {
    let (start, count, of) = match coordinate {
        Coordinate::Replicated => (0, 0, 0),
        Coordinate::Heads { start, count, of } => (start, count, of),
    };
    CoordinateReport { text: coordinate.to_string(), start, count, of }
}

/// A whole number where the ratio is one, the nearest decimal otherwise.
fn decimal<S: Serializer>(ratio: &Ratio, serializer: S) -> Result<S::Ok, S::Error> {
    match ratio.whole() {
        Some(whole) => serializer.serialize_u64(whole),
        None => serializer.serialize_f64(ratio.to_f64()),
    }
}

fn optional_decimal<S: Serializer>(ratio: &Option<Ratio>, serializer: S) -> Result<S::Ok, S::Error> {
    match ratio {
        Some(ratio) => decimal(ratio, serializer),
        None => serializer.serialize_none(),
    }
}
