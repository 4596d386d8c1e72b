//! What of a model spec moves bytes: which parts each layer has, in what order, and how large they are.
//!
//! A geometry is what the store keeps (as canonical bytes, see `canonical`) and what shapes are made of; names,
//! sources and costs live around it in a `ModelSpec`. Invariants, checked once when it is built:
//! - its parts are distinct and stand in the order in which the layers first use them;
//! - a group has one role class and one number of heads, and the heads divide the bytes of every part;
//! - every stream has whole entries in a block of [`Geometry::entry_tokens`], and a block of that size is within
//!   the limits of a shape, so that sums over parts fit 64 bits for every number of block tokens.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use crate::coord::{self, Coordinate};
use crate::ids::Group;
use crate::shape::{
    BlockShape, ChunkShape, LayerShape, MAX_ALIGN, MAX_BLOCK_BYTES, MAX_BLOCK_TOKENS, MAX_CHUNK_BYTES,
    MAX_CHUNKS, MAX_LAYERS,
};

use super::error::SpecError;
use super::kind::Kind;
use super::limits::{MAX_PARTS, MAX_PARTS_PER_LAYER};
use super::ratio::{Ratio, lcm};

/// How the bytes of a part depend on tokens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    /// Grows with tokens: one entry of `bytes` each `tokens` tokens, and every block has its piece.
    Stream {
        /// Bytes of one entry.
        bytes: u64,
        /// Tokens that one entry covers.
        tokens: u32,
    },
    /// One page of `bytes` for every block, however many tokens a block has: what engines with flat pages give.
    Page {
        /// Bytes of one block.
        bytes: u64,
    },
    /// The entries of the last `tokens` tokens, valid at one block boundary. Always stored at its full size, also
    /// where fewer tokens came before; or kept as a stream of `bytes` a token when all of it is kept.
    Window {
        /// Bytes of one token.
        bytes: u64,
        /// Tokens in the window.
        tokens: u32,
    },
    /// A state of `bytes`, valid at one block boundary.
    State {
        /// Bytes that the engine holds.
        bytes: u64,
        /// The state holds nothing at boundaries that are a multiple of this many tokens.
        empty_at_multiple_of: Option<NonZeroU32>,
    },
}

/// The three kinds of retention that a group can have.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum RoleClass {
    /// Every block has its piece ([`Role::Stream`], [`Role::Page`]).
    Stream,
    /// The last tokens before a boundary ([`Role::Window`]).
    Window,
    /// A state at a boundary ([`Role::State`]).
    State,
}

impl RoleClass {
    /// The class in one word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Window => "window",
            Self::State => "state",
        }
    }

    /// The group of parts that name none: streams 0, windows 1, states 2.
    pub fn default_group(self) -> Group {
        Group(match self {
            Self::Stream => 0,
            Self::Window => 1,
            Self::State => 2,
        })
    }

    /// Whether blocks of this class are valid at one boundary only.
    pub fn is_boundary(self) -> bool {
        self != Self::Stream
    }
}

impl Role {
    /// The kind of retention.
    pub fn class(self) -> RoleClass {
        match self {
            Self::Stream { .. } | Self::Page { .. } => RoleClass::Stream,
            Self::Window { .. } => RoleClass::Window,
            Self::State { .. } => RoleClass::State,
        }
    }

    /// Bytes that this part has in one stored block of this many tokens; zero for a state that is empty at each
    /// boundary of such blocks. `None` if the block is not whole entries or the product does not fit.
    pub fn stored_bytes(self, block_tokens: u32) -> Option<u64> {
        match self {
            Self::Stream { bytes, tokens } => {
                if block_tokens.checked_rem(tokens)? != 0 {
                    return None;
                }
                bytes.checked_mul(u64::from(block_tokens.checked_div(tokens)?))
            }
            Self::Page { bytes } => Some(bytes),
            Self::Window { bytes, tokens } => bytes.checked_mul(u64::from(tokens)),
            Self::State { bytes, empty_at_multiple_of } => {
                let empty =
                    empty_at_multiple_of.is_some_and(|n| block_tokens.checked_rem(n.get()) == Some(0));
                Some(if empty { 0 } else { bytes })
            }
        }
    }

    /// Bytes that the engine holds for this part at one moment, if that does not depend on tokens.
    pub fn held_bytes(self) -> Option<u64> {
        match self {
            Self::Stream { .. } | Self::Page { .. } => None,
            Self::Window { bytes, tokens } => bytes.checked_mul(u64::from(tokens)),
            Self::State { bytes, .. } => Some(bytes),
        }
    }

    fn unit_bytes(self) -> u64 {
        match self {
            Self::Stream { bytes, .. }
            | Self::Page { bytes }
            | Self::Window { bytes, .. }
            | Self::State { bytes, .. } => bytes,
        }
    }

    fn tokens(self) -> Option<u32> {
        match self {
            Self::Stream { tokens, .. } | Self::Window { tokens, .. } => Some(tokens),
            Self::State { empty_at_multiple_of, .. } => empty_at_multiple_of.map(NonZeroU32::get),
            Self::Page { .. } => None,
        }
    }
}

/// What of a part moves bytes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PartGeometry {
    /// What the bytes are.
    pub kind: Kind,
    /// How many there are.
    pub role: Role,
    /// Heads that tensor-parallel ranks can share out; 0 when every rank holds the whole.
    pub heads: u16,
    /// Alignment in a payload: a power of two, at most [`MAX_ALIGN`].
    pub align: u32,
    /// The group whose blocks carry this part.
    pub group: Group,
}

impl PartGeometry {
    /// Checks everything that can be said of one part alone.
    pub fn check(&self) -> Result<(), SpecError> {
        let bytes = self.role.unit_bytes();
        if bytes == 0 || bytes > MAX_CHUNK_BYTES {
            return Err(SpecError::PartBytes { bytes });
        }
        if let Some(tokens) = self.role.tokens()
            && (tokens == 0 || tokens > MAX_BLOCK_TOKENS)
        {
            // No entry or window spans more than the longest block.
            return Err(SpecError::PartTokens { tokens: tokens.into() });
        }
        if let Some(bytes) = self.role.held_bytes().filter(|&bytes| bytes > MAX_CHUNK_BYTES) {
            return Err(SpecError::PartBytes { bytes });
        }
        if !self.align.is_power_of_two() || self.align > MAX_ALIGN {
            return Err(SpecError::Align { align: self.align });
        }
        if bytes.checked_rem(u64::from(self.heads)).is_some_and(|rest| rest != 0) {
            return Err(SpecError::UnevenHeads { heads: self.heads, bytes });
        }
        Ok(())
    }
}

/// What the parts of one group have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupGeometry {
    /// The group.
    pub group: Group,
    /// The retention of its blocks.
    pub class: RoleClass,
    /// Heads that ranks can share out; 0 when every rank holds the whole.
    pub heads: u16,
    /// The longest window among the parts; 0 where the class is not [`RoleClass::Window`].
    pub window_tokens: u32,
}

/// What a prefix takes, counted in whole blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefixBytes {
    /// Whole blocks in the prefix.
    pub blocks: u64,
    /// Tokens in those blocks.
    pub tokens: u64,
    /// Bytes of all streams of those blocks.
    pub stream_bytes: u64,
    /// Bytes of the windows and states at one boundary; zero where there is no block.
    pub boundary_bytes: u64,
}

/// The parts of every layer of a model, in execution order. Within its limits by construction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Geometry {
    parts: Vec<PartGeometry>,
    layers: Vec<Vec<u16>>,
    groups: Vec<GroupGeometry>,
    entry_tokens: u32,
}

impl Geometry {
    /// A geometry from a table of parts and, for each layer in execution order, the indices of its parts. Equal
    /// parts of the table are merged and the table is put in the order of first use, so that equal geometries
    /// are equal structs.
    pub fn new(parts: &[PartGeometry], layers: &[Vec<u16>]) -> Result<Self, SpecError> {
        check_counts(parts, layers)?;
        parts.iter().try_for_each(PartGeometry::check)?;
        let mut table: Vec<PartGeometry> = Vec::new();
        let mut renumbered: Vec<Option<u16>> = vec![None; parts.len()];
        let mut numbered = Vec::with_capacity(layers.len());
        for (index, layer) in (0u32..).zip(layers) {
            let mut indices = Vec::with_capacity(layer.len());
            for &part in layer {
                let unknown = SpecError::UnknownPart { layer: index };
                let geometry = parts.get(usize::from(part)).ok_or(unknown)?;
                let slot = renumbered.get_mut(usize::from(part)).ok_or(unknown)?;
                let place = match *slot {
                    Some(place) => place,
                    None => place_of(geometry, &mut table)?,
                };
                *slot = Some(place);
                indices.push(place);
            }
            numbered.push(indices);
        }
        if let Some((part, _)) = (0u32..).zip(&renumbered).find(|(_, place)| place.is_none()) {
            return Err(SpecError::UnusedPart { part });
        }
        let groups = groups_of(&table)?;
        let entry_tokens = entry_tokens_of(&table)?;
        let geometry = Self { parts: table, layers: numbered, groups, entry_tokens };
        geometry.check_smallest_blocks()?;
        Ok(geometry)
    }

    /// The geometry of flat pages: one layer, one replicated part of `bytes` a block, whatever a block's tokens.
    pub fn opaque(bytes: u64) -> Result<Self, SpecError> {
        let kind = Kind::new("opaque").ok_or(SpecError::Overflow)?;
        let part = PartGeometry { kind, role: Role::Page { bytes }, heads: 0, align: 1, group: Group(0) };
        Self::new(&[part], &[vec![0]])
    }

    /// The distinct parts, in the order of first use.
    pub fn parts(&self) -> &[PartGeometry] {
        &self.parts
    }

    /// For each layer in execution order, the indices of its parts in [`Geometry::parts`].
    pub fn layers(&self) -> &[Vec<u16>] {
        &self.layers
    }

    /// The groups, in increasing order.
    pub fn groups(&self) -> &[GroupGeometry] {
        &self.groups
    }

    /// The group, if the model has it.
    pub fn group(&self, group: Group) -> Option<&GroupGeometry> {
        self.groups.iter().find(|known| known.group == group)
    }

    /// The least number of tokens that is whole entries of every stream: block tokens are a multiple of it.
    pub fn entry_tokens(&self) -> u32 {
        self.entry_tokens
    }

    /// Whether blocks of this many tokens are possible.
    pub fn check_block_tokens(&self, block_tokens: u32) -> Result<(), SpecError> {
        let whole = block_tokens.checked_rem(self.entry_tokens) == Some(0);
        if block_tokens == 0 || block_tokens > MAX_BLOCK_TOKENS || !whole {
            return Err(SpecError::BlockTokens { block_tokens, multiple_of: self.entry_tokens });
        }
        Ok(())
    }

    /// The shape of one block of a group at a coordinate. A group with heads takes head ranges of exactly that
    /// many heads (a single rank holds all of them); a group without takes `Replicated`.
    pub fn shape(
        &self,
        group: Group,
        coordinate: Coordinate,
        block_tokens: u32,
    ) -> Result<BlockShape, SpecError> {
        self.shape_with(group, coordinate, block_tokens, |role| role.stored_bytes(block_tokens))
    }

    /// The shape of one block of a window group when windows are kept in full: a stream with the entries of the
    /// block's own tokens.
    pub fn window_stream_shape(
        &self,
        group: Group,
        coordinate: Coordinate,
        block_tokens: u32,
    ) -> Result<BlockShape, SpecError> {
        if self.group(group).is_some_and(|known| known.class != RoleClass::Window) {
            return Err(SpecError::NotAWindow { group });
        }
        self.shape_with(group, coordinate, block_tokens, |role| match role {
            Role::Window { bytes, .. } => bytes.checked_mul(u64::from(block_tokens)),
            _ => None,
        })
    }

    /// Whether blocks of this group hold anything at all with blocks of this many tokens. A group of states that
    /// are empty at every boundary does not, and nothing needs to be there to restore it.
    pub fn is_stored(&self, group: Group, block_tokens: u32) -> bool {
        self.parts.iter().any(|part| {
            part.group == group && part.role.stored_bytes(block_tokens).is_some_and(|bytes| bytes > 0)
        })
    }

    /// Bytes of all streams for one token: exact. It depends on the block tokens only where a part is a page.
    pub fn stream_bytes_per_token(&self, block_tokens: u32) -> Result<Ratio, SpecError> {
        let bytes = self.class_bytes(block_tokens, |class| class == RoleClass::Stream)?;
        Ratio::new(bytes, block_tokens.into()).ok_or(SpecError::Overflow)
    }

    /// Bytes of all windows and states stored at one block boundary: exact.
    pub fn boundary_bytes(&self, block_tokens: u32) -> Result<u64, SpecError> {
        self.class_bytes(block_tokens, RoleClass::is_boundary)
    }

    /// Bytes of one block of a group over all coordinates; zero where nothing is stored.
    pub fn group_bytes(&self, group: Group, block_tokens: u32) -> Result<u64, SpecError> {
        self.group(group).ok_or(SpecError::UnknownGroup { group })?;
        self.sum_bytes(block_tokens, |part| part.group == group)
    }

    /// What it takes to keep the whole blocks of a prefix of this many tokens, with the state at one boundary.
    pub fn bytes_for_tokens(&self, tokens: u64, block_tokens: u32) -> Result<PrefixBytes, SpecError> {
        self.check_block_tokens(block_tokens)?;
        let blocks = tokens.checked_div(block_tokens.into()).ok_or(SpecError::Overflow)?;
        let block_bytes = self.class_bytes(block_tokens, |class| class == RoleClass::Stream)?;
        Ok(PrefixBytes {
            blocks,
            tokens: blocks.checked_mul(block_tokens.into()).ok_or(SpecError::Overflow)?,
            stream_bytes: blocks.checked_mul(block_bytes).ok_or(SpecError::Overflow)?,
            boundary_bytes: if blocks > 0 { self.boundary_bytes(block_tokens)? } else { 0 },
        })
    }

    /// The coordinate that one of `ranks` tensor-parallel ranks holds of a group.
    pub fn coordinate(&self, group: Group, ranks: u16, rank: u16) -> Result<Coordinate, SpecError> {
        let known = self.group(group).ok_or(SpecError::UnknownGroup { group })?;
        Ok(coord::tensor_parallel(known.heads, ranks, rank)?)
    }

    /// The distinct coordinates that `ranks` tensor-parallel ranks hold of a group: what is stored of each block.
    pub fn coordinates(&self, group: Group, ranks: u16) -> Result<Vec<Coordinate>, SpecError> {
        let known = self.group(group).ok_or(SpecError::UnknownGroup { group })?;
        Ok(coord::coordinates(known.heads, ranks)?)
    }

    /// How many times each part of [`Geometry::parts`] occurs over all layers.
    pub fn part_counts(&self) -> Vec<u64> {
        let mut counts = vec![0u64; self.parts.len()];
        for &part in self.layers.iter().flatten() {
            if let Some(count) = counts.get_mut(usize::from(part)) {
                *count = count.saturating_add(1);
            }
        }
        counts
    }

    fn shape_with(
        &self,
        group: Group,
        coordinate: Coordinate,
        block_tokens: u32,
        bytes_of: impl Fn(Role) -> Option<u64>,
    ) -> Result<BlockShape, SpecError> {
        self.check_block_tokens(block_tokens)?;
        let known = self.group(group).ok_or(SpecError::UnknownGroup { group })?;
        // The chunk of each part of the table, or `None` where the part is not in this group or holds nothing.
        let mut chunks = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            let bytes =
                if part.group == group { bytes_of(part.role).ok_or(SpecError::Overflow)? } else { 0 };
            let bytes = share(bytes, known, coordinate)?;
            chunks.push((bytes > 0).then_some(ChunkShape { bytes, align: part.align }));
        }
        if chunks.iter().all(Option::is_none) {
            return Err(SpecError::NothingStored { group });
        }
        let mut layers = Vec::new();
        for (layer, parts) in (0u32..).zip(&self.layers) {
            let chunks: Vec<ChunkShape> =
                parts.iter().filter_map(|&part| *chunks.get(usize::from(part))?).collect();
            if !chunks.is_empty() {
                layers.push(LayerShape { layer, chunks });
            }
        }
        Ok(BlockShape::new(layers)?)
    }

    fn class_bytes(&self, block_tokens: u32, wanted: impl Fn(RoleClass) -> bool) -> Result<u64, SpecError> {
        self.sum_bytes(block_tokens, |part| wanted(part.role.class()))
    }

    fn sum_bytes(&self, block_tokens: u32, wanted: impl Fn(&PartGeometry) -> bool) -> Result<u64, SpecError> {
        self.check_block_tokens(block_tokens)?;
        self.parts
            .iter()
            .zip(self.part_counts())
            .filter(|(part, _)| wanted(part))
            .try_fold(0u64, |sum, (part, count)| {
                let bytes = part.role.stored_bytes(block_tokens)?.checked_mul(count)?;
                sum.checked_add(bytes)
            })
            .ok_or(SpecError::Overflow)
    }

    fn check_smallest_blocks(&self) -> Result<(), SpecError> {
        for known in &self.groups {
            if self.group_bytes(known.group, self.entry_tokens)? > MAX_BLOCK_BYTES {
                return Err(SpecError::BlockBytes { group: known.group });
            }
        }
        Ok(())
    }
}

/// The bytes of a whole part that a coordinate holds. Exact, because heads divide the bytes of every part.
fn share(bytes: u64, group: &GroupGeometry, coordinate: Coordinate) -> Result<u64, SpecError> {
    match coordinate {
        Coordinate::Replicated if group.heads == 0 => Ok(bytes),
        Coordinate::Heads { count, of, .. } if of == group.heads && of > 0 => bytes
            .checked_div(of.into())
            .and_then(|head| head.checked_mul(count.into()))
            .ok_or(SpecError::Overflow),
        _ => Err(SpecError::Coordinate { group: group.group, heads: group.heads, coordinate }),
    }
}

fn check_counts(parts: &[PartGeometry], layers: &[Vec<u16>]) -> Result<(), SpecError> {
    if layers.is_empty() {
        return Err(SpecError::NoLayers);
    }
    if layers.len() > MAX_LAYERS {
        return Err(SpecError::TooManyLayers);
    }
    if parts.len() > MAX_PARTS {
        return Err(SpecError::TooManyParts);
    }
    let mut chunks = 0usize;
    for (layer, parts) in (0u32..).zip(layers) {
        if parts.is_empty() || parts.len() > MAX_PARTS_PER_LAYER {
            return Err(SpecError::LayerParts { layer });
        }
        chunks = chunks.saturating_add(parts.len());
    }
    if chunks > MAX_CHUNKS {
        return Err(SpecError::TooManyChunks);
    }
    Ok(())
}

/// The place of a part in the table, where it is appended if no equal part is there.
fn place_of(part: &PartGeometry, table: &mut Vec<PartGeometry>) -> Result<u16, SpecError> {
    let place = table.iter().position(|known| known == part).unwrap_or(table.len());
    if place == table.len() {
        table.push(part.clone());
    }
    u16::try_from(place).map_err(|_| SpecError::TooManyParts)
}

fn groups_of(table: &[PartGeometry]) -> Result<Vec<GroupGeometry>, SpecError> {
    let mut groups: BTreeMap<Group, GroupGeometry> = BTreeMap::new();
    for part in table {
        let (group, class) = (part.group, part.role.class());
        let window_tokens = match part.role {
            Role::Window { tokens, .. } => tokens,
            _ => 0,
        };
        let known =
            groups.entry(group).or_insert(GroupGeometry { group, class, heads: part.heads, window_tokens });
        if known.class != class {
            return Err(SpecError::MixedRoles { group });
        }
        if known.heads != part.heads {
            return Err(SpecError::MixedHeads { group });
        }
        known.window_tokens = known.window_tokens.max(window_tokens);
    }
    Ok(groups.into_values().collect())
}

fn entry_tokens_of(table: &[PartGeometry]) -> Result<u32, SpecError> {
    let mut all = 1u64;
    for part in table {
        if let Role::Stream { tokens, .. } = part.role {
            all = lcm(all, tokens.into()).ok_or(SpecError::EntryTokens)?;
            if all > u64::from(MAX_BLOCK_TOKENS) {
                return Err(SpecError::EntryTokens);
            }
        }
    }
    u32::try_from(all).map_err(|_| SpecError::EntryTokens)
}
