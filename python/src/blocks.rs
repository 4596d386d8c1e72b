//! The blocks of a request: keys, and of each its group and rank.

use kvarts_contract::batch::{BatchId, BatchKind, Block, Memory, Pages, Terms};
use kvarts_contract::error::Error;
use kvarts_layout::cut::Cut;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group};
use pyo3::prelude::*;

use crate::error::{OrRaise, invalid};
use crate::keys;

/// Blocks, with their shapes where they have memory.
pub(crate) struct Asked<'a> {
    /// Nothing where `bare` has them.
    pub(crate) blocks: Vec<Block>,
    pub(crate) shapes: Vec<&'a BlockShape>,
    /// Those without memory, if they are of one group and coordinate.
    bare: Option<((Group, Coordinate), Vec<BlockKey>)>,
}

impl Asked<'_> {
    /// Submits them as a batch.
    pub(crate) fn submit(
        self,
        batches: &Pages,
        kind: BatchKind,
        memory: &Memory<'_>,
        terms: &Terms,
    ) -> Result<BatchId, Error> {
        match self.bare {
            Some((column, keys)) => batches.submit_keys(kind, column, keys, terms),
            None => batches.submit(kind, &self.blocks, memory, terms),
        }
    }
}

/// One number for all keys, or one for each.
enum Each<T> {
    All(T),
    One(Vec<T>),
}

impl<T: Copy> Each<T> {
    fn get(&self, at: usize) -> Option<T> {
        match self {
            Self::All(all) => Some(*all),
            Self::One(each) => each.get(at).copied(),
        }
    }

    /// The number of one key of those that are read one after the other.
    fn of(&self, py: Python<'_>, argument: &str, at: usize) -> PyResult<T> {
        self.get(at).ok_or_else(|| {
            invalid(py, argument, format!("only {at} values were given: give one value for each key"))
        })
    }

    /// Refuses more numbers than keys.
    fn for_all(&self, py: Python<'_>, argument: &str, keys: usize) -> PyResult<()> {
        match self {
            Self::One(each) if each.len() != keys => {
                Err(invalid(py, argument, format!("{} values were given for {keys} keys", each.len())))
            }
            _ => Ok(()),
        }
    }
}

fn each<'py, T: for<'a> FromPyObject<'a, 'py>>(
    argument: &str,
    given: &Bound<'py, PyAny>,
) -> PyResult<Each<T>> {
    if let Ok(all) = given.extract::<T>() {
        return Ok(Each::All(all));
    }
    let py = given.py();
    let numbers = given.extract::<Vec<T>>();
    numbers.map(Each::One).map_err(|_| {
        invalid(
            py,
            argument,
            "the value must be a small number, or a list with one number for each \
            key",
        )
    })
}

/// What is asked for.
pub(crate) fn asked<'a>(
    cut: &'a Cut,
    keys: &Bound<'_, PyAny>,
    (group, rank): (Option<&Bound<'_, PyAny>>, Option<&Bound<'_, PyAny>>),
    with_shapes: bool,
) -> PyResult<Asked<'a>> {
    let py = keys.py();
    let groups = match group {
        Some(group) => each::<u32>("group", group)?,
        None => Each::All(0),
    };
    let ranks = match rank {
        Some(rank) => each::<u16>("rank", rank)?,
        None => Each::All(cut.tp_rank),
    };
    if let (Each::All(group), Each::All(rank)) = (&groups, &ranks) {
        let (group, coordinate, shape) = cut.column(*group, Some(*rank)).or_raise(py)?;
        let keys = keys::keys(keys)?;
        if !with_shapes {
            let bare = Some(((group, coordinate), keys));
            return Ok(Asked { blocks: Vec::new(), shapes: Vec::new(), bare });
        }
        let blocks: Vec<_> = keys.into_iter().map(|key| Block { group, coordinate, key }).collect();
        let shapes = vec![shape; blocks.len()];
        return Ok(Asked { blocks, shapes, bare: None });
    }
    let keys = keys::keys(keys)?;
    let (mut blocks, mut shapes) = (Vec::with_capacity(keys.len()), Vec::with_capacity(keys.len()));
    let mut last = None;
    for (at, key) in keys.into_iter().enumerate() {
        let (group, rank) = (groups.of(py, "group", at)?, ranks.of(py, "rank", at)?);
        let column = match last {
            Some((wanted, column)) if wanted == (group, rank) => column,
            _ => cut.column(group, Some(rank)).or_raise(py)?,
        };
        last = Some(((group, rank), column));
        let (group, coordinate, shape) = column;
        blocks.push(Block { group, coordinate, key });
        shapes.push(shape);
    }
    groups.for_all(py, "group", blocks.len())?;
    ranks.for_all(py, "rank", blocks.len())?;
    Ok(Asked { blocks, shapes, bare: None })
}
