//! What is played under every schedule: a few threads, what they do, and what must be true in whatever order they run.

mod blocks;
mod engine;
mod messages;
mod streams;

pub use engine::shared_bytes;
pub(crate) use engine::{counted, read_of};

use kvarts_contract::sync::Race;

/// A few threads and what must be true of them.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    /// Its name.
    pub name: &'static str,
    /// Plays it once, inside of a scheduler. Panics with what is wrong.
    pub(crate) play: fn(),
    /// The mistakes that it is there to find.
    pub finds: &'static [Race],
    /// How long it takes, in tenths of a millisecond, about: what is cheap is played more often.
    pub cost: u32,
}

/// All scenes.
pub fn all() -> Vec<Scene> {
    let mut scenes = blocks::scenes();
    scenes.extend(messages::scenes());
    scenes.extend(streams::scenes());
    scenes.extend(engine::scenes());
    scenes
}
