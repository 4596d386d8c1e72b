//! The identity of blocks from keyword arguments: what decides their bytes, and how they are cut.

use std::collections::BTreeMap;

use kvarts_layout::identity::{Arrangement, IdentityError, Quantisation};
use kvarts_layout::prefix::{Absence, Need, Requirement, Requirements, WindowPolicy};
use kvarts_layout::spec::{Kind, ModelSpec, PartGeometry, Role, shipped};
use kvarts_layout::{BlockShape, Coordinate, Geometry, Group, Identity};
use pyo3::prelude::*;

use crate::error::invalid;

/// The most ranks, and page sizes, of a handle.
const RANKS_MAX: u16 = 1024;
const GROUPS_MAX: usize = 64;

/// What a handle is asked for.
pub(crate) struct Wanted {
    pub(crate) model: String,
    pub(crate) revision: String,
    pub(crate) dtype: String,
    pub(crate) engine: String,
    pub(crate) layout: String,
    pub(crate) layout_version: String,
    pub(crate) block_tokens: u32,
    pub(crate) tokenizer: String,
    pub(crate) adapter: String,
    pub(crate) quantisation: String,
    pub(crate) scales: String,
    pub(crate) rope: String,
    pub(crate) window: String,
    pub(crate) extras: BTreeMap<String, String>,
    pub(crate) tp_size: u16,
    pub(crate) tp_rank: u16,
}

/// The blocks of an identity.
pub(crate) struct Cut {
    pub(crate) identity: Identity,
    pub(crate) geometry: Geometry,
    pub(crate) requirements: Requirements,
    pub(crate) tp_rank: u16,
    /// The coordinate of each rank, by group; and the shape of its blocks.
    pub(crate) columns: Vec<(Group, u16, Coordinate, BlockShape)>,
}

impl Cut {
    /// Blocks of one group and rank.
    pub(crate) fn column(
        &self,
        py: Python<'_>,
        group: u32,
        rank: Option<u16>,
    ) -> PyResult<(Group, Coordinate, &BlockShape)> {
        let wanted = (Group(group), rank.unwrap_or(self.tp_rank));
        let found = self.columns.iter().find(|(group, rank, ..)| (*group, *rank) == wanted);
        match found {
            Some((group, _, coordinate, shape)) => Ok((*group, *coordinate, shape)),
            None if self.columns.iter().any(|(known, ..)| known.0 == group) => {
                Err(invalid(py, "rank", format!("{}: there is no such rank", wanted.1)))
            }
            None => Err(invalid(py, "group", format!("{group}: this handle has no such group"))),
        }
    }

    /// What the blocks of this identity are like.
    pub(crate) fn new(
        py: Python<'_>,
        page_bytes: Option<BTreeMap<u32, u64>>,
        spec: Option<&str>,
        wanted: Wanted,
    ) -> PyResult<Self> {
        let ranks = wanted.tp_size;
        if ranks == 0 || ranks > RANKS_MAX {
            return Err(invalid(py, "tp_size", format!("1 to {RANKS_MAX}")));
        }
        if wanted.tp_rank >= ranks {
            return Err(invalid(
                py,
                "tp_rank",
                format!("{}: ranks count from 0 to {}", wanted.tp_rank, ranks - 1),
            ));
        }
        let (geometry, requirements) = match (page_bytes, spec) {
            (Some(sizes), None) => paged(py, &sizes, wanted.block_tokens, ranks)?,
            (None, Some(spec)) => modelled(py, spec, wanted.block_tokens, ranks)?,
            _ => return Err(invalid(py, "page_bytes", "give either page_bytes or spec")),
        };
        let mut columns = Vec::new();
        for group in geometry.groups() {
            for rank in 0..ranks {
                let coordinate = geometry.coordinate(group.group, ranks, rank);
                let coordinate = coordinate.map_err(|error| invalid(py, "tp_size", error))?;
                // A group that has nothing at blocks of this size has no blocks.
                if let Ok(shape) = geometry.shape(group.group, coordinate, wanted.block_tokens) {
                    columns.push((group.group, rank, coordinate, shape));
                }
            }
        }
        let tp_rank = wanted.tp_rank;
        let identity = wanted.identity(&geometry);
        let checked = identity.validate();
        checked.map_err(|error| invalid(py, argument(&error), error))?;
        Ok(Self { identity, geometry, requirements, tp_rank, columns })
    }
}

/// The argument that an identity's field came from.
fn argument(error: &IdentityError) -> &'static str {
    let field = match error {
        IdentityError::Missing { field }
        | IdentityError::Unnamed { field }
        | IdentityError::Untidy { field }
        | IdentityError::TooLong { field, .. } => field,
        IdentityError::BlockTokens { .. } => "block_tokens",
        _ => "identity",
    };
    match field {
        "kv_dtype" => "dtype",
        "quantisation.recipe" => "quantisation",
        "quantisation.scales" => "scales",
        "arrangement.engine" => "engine",
        "arrangement.layout" => "layout",
        "arrangement.version" => "layout_version",
        "extras name" | "extras value" => "extras",
        field => field,
    }
}

impl Wanted {
    fn identity(self, geometry: &Geometry) -> Identity {
        let arrangement = Arrangement::new(&self.engine, &self.layout, &self.layout_version);
        let identity =
            Identity::new(&self.model, &self.revision, &self.dtype, arrangement, geometry, self.block_tokens);
        Identity {
            tokenizer: self.tokenizer,
            adapter: self.adapter,
            quantisation: Quantisation { recipe: self.quantisation, scales: self.scales },
            rope: self.rope,
            window: self.window,
            extras: self.extras,
            ..identity
        }
    }
}

/// Flat pages: a size for each group, as many parts as there are ranks.
fn paged(
    py: Python<'_>,
    sizes: &BTreeMap<u32, u64>,
    block_tokens: u32,
    ranks: u16,
) -> PyResult<(Geometry, Requirements)> {
    let wrong = |what: &dyn std::fmt::Display| invalid(py, "page_bytes", what);
    if sizes.is_empty() || sizes.len() > GROUPS_MAX {
        return Err(wrong(&format!("1 to {GROUPS_MAX} groups")));
    }
    let kind = Kind::new("opaque").ok_or_else(|| wrong(&"no pages"))?;
    let heads = if ranks == 1 { 0 } else { ranks };
    let mut parts = Vec::new();
    for (group, &bytes) in sizes {
        let bytes = bytes.checked_mul(ranks.into()).ok_or_else(|| wrong(&"too large"))?;
        let role = Role::Page { bytes };
        parts.push(PartGeometry { kind: kind.clone(), role, heads, align: 1, group: Group(*group) });
    }
    let layers: Vec<Vec<u16>> = (0..).zip(&parts).map(|(at, _)| vec![at]).collect();
    let geometry = Geometry::new(&parts, &layers).map_err(|error| wrong(&error))?;
    let mut needs = Vec::new();
    for group in geometry.groups() {
        let coordinates = geometry.coordinates(group.group, ranks).map_err(|error| wrong(&error))?;
        needs.push(Requirement {
            group: group.group,
            coordinates,
            need: Need::All,
            absence: Absence::Required,
        });
    }
    let requirements = Requirements::new(block_tokens, needs);
    Ok((geometry, requirements.map_err(|error| invalid(py, "block_tokens", error))?))
}

/// A model: one that is shipped, or a spec's text.
fn modelled(py: Python<'_>, spec: &str, block_tokens: u32, ranks: u16) -> PyResult<(Geometry, Requirements)> {
    let spec = match shipped::load(spec) {
        Some(spec) => spec,
        None => ModelSpec::parse(spec).map_err(|error| {
            invalid(py, "spec", format!("no shipped model of that name, and no text of a spec: {error}"))
        })?,
    };
    let requirements = spec.requirements(block_tokens, WindowPolicy::Zero, ranks);
    let requirements = requirements.map_err(|error| invalid(py, "block_tokens", error))?;
    Ok((spec.geometry().clone(), requirements))
}
