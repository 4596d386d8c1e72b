//! The blocks of a request: keys, and of each its group and rank.

use kvarts_contract::batch::Block;
use kvarts_layout::cut::Cut;
use kvarts_layout::{BlockShape, Coordinate, Group};
use pyo3::prelude::*;

use crate::error::{OrRaise, invalid};
use crate::keys;

/// Blocks, with their shapes where they have memory.
pub(crate) struct Asked<'a> {
    pub(crate) blocks: Vec<Block>,
    pub(crate) shapes: Vec<&'a BlockShape>,
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
        self.get(at).ok_or_else(|| invalid(py, argument, format!("{at} for more keys")))
    }

    /// Refuses more numbers than keys.
    fn for_all(&self, py: Python<'_>, argument: &str, keys: usize) -> PyResult<()> {
        match self {
            Self::One(each) if each.len() != keys => {
                Err(invalid(py, argument, format!("{} for {keys} keys", each.len())))
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
    numbers.map(Each::One).map_err(|_| invalid(py, argument, "a small number, or one for each key"))
}

/// What is asked for.
pub(crate) fn asked<'a>(
    cut: &'a Cut,
    keys: &Bound<'_, PyAny>,
    (group, rank): (Option<&Bound<'_, PyAny>>, Option<&Bound<'_, PyAny>>),
    with_shapes: bool,
) -> PyResult<Asked<'a>> {
    let py = keys.py();
    let wanted = keys::count(keys);
    let groups = match group {
        Some(group) => each::<u32>("group", group)?,
        None => Each::All(0),
    };
    let ranks = match rank {
        Some(rank) => each::<u16>("rank", rank)?,
        None => Each::All(cut.tp_rank),
    };
    let mut blocks = Vec::with_capacity(wanted);
    let mut shapes = Vec::with_capacity(if with_shapes { wanted } else { 0 });
    let mut last: Option<(u32, u16, Group, Coordinate, &BlockShape)> = None;
    keys::each(keys, |key| {
        let at = blocks.len();
        let (group, rank) = (groups.of(py, "group", at)?, ranks.of(py, "rank", at)?);
        let (group, coordinate, shape) = match last {
            Some((g, r, found, coordinate, shape)) if (g, r) == (group, rank) => (found, coordinate, shape),
            _ => {
                let (found, coordinate, shape) = cut.column(group, Some(rank)).or_raise(py)?;
                last = Some((group, rank, found, coordinate, shape));
                (found, coordinate, shape)
            }
        };
        blocks.push(Block { group, coordinate, key });
        if with_shapes {
            shapes.push(shape);
        }
        Ok(())
    })?;
    groups.for_all(py, "group", blocks.len())?;
    ranks.for_all(py, "rank", blocks.len())?;
    Ok(Asked { blocks, shapes })
}
