//! The demonstration's report for people: a paragraph for each step, and the layers drawn over time.

use std::io::Write;

use serde::Serialize;

use super::Story;
use kvarts_server::human::bytes;
use kvarts_terminal::Failure;

/// Characters of the timeline.
const WIDTH: usize = 56;
/// Lines of it: of more layers every second, third, ... is shown.
const LINES: usize = 32;

/// When a layer arrived, and from when to when it was used, in seconds from the request.
#[derive(Serialize, Clone, Debug)]
pub(super) struct Layer {
    pub(super) layer: u32,
    pub(super) arrived: f64,
    pub(super) began: f64,
    pub(super) ended: f64,
}

fn rate(count: u64, seconds: f64) -> String {
    format!("{}/s", bytes((count as f64 / seconds.max(1e-9)) as u64))
}

/// Writes the report.
pub(super) fn write(story: &Story, out: &mut dyn Write) -> Result<(), Failure> {
    let (tokens, blocks) = (story.tokens, story.prefix_blocks);
    writeln!(
        out,
        "1. A server was started, and the state of {tokens} tokens of {} stored in it: {} in {blocks} blocks of {} \
         layers,\n   durably, in {:.2} s ({}).",
        story.model,
        bytes(story.prefix_bytes),
        story.layers,
        story.store_seconds,
        rate(story.prefix_bytes, story.store_seconds)
    )?;
    writeln!(
        out,
        "2. {} sessions continued from this prefix. Each session found the {} blocks of the prefix \
         and stored only its own: {} blocks in all.\n   \
         The blocks use {} on disk; without sharing they would use {}.",
        story.sessions,
        story.session_blocks_matched / story.sessions,
        story.session_blocks_stored,
        bytes(
            story.prefix_bytes / story.prefix_blocks.max(1)
                * (story.prefix_blocks + story.session_blocks_stored)
        ),
        bytes(story.bytes_without_sharing)
    )?;
    writeln!(
        out,
        "3. The server was killed ({}) and started again: {:.2} s, {} blocks found on disk, {} of {blocks} blocks of the \
         prefix usable.",
        story.killed_with, story.restart_seconds, story.blocks_recovered, story.blocks_matched
    )?;
    writeln!(
        out,
        "4. The prefix was read back layer by layer over the {} path, into memory shared with the \
        server, while the layers\n   that had arrived were used (every byte was compared with the stored \
        bytes: {} differ):\n",
        story.path, story.bytes_differing
    )?;
    timeline(story, out)?;
    let one_by_one = story.read_seconds + story.compute_seconds;
    writeln!(
        out,
        "\n   The read took {:.0} ms ({}), and the use of the layers {:.0} ms: {:.0} ms in sequence, but \
        {:.0} ms overlapped.\n   The first layer was available after {:.1} ms.",
        story.read_seconds * 1e3,
        rate(story.prefix_bytes, story.read_seconds),
        story.compute_seconds * 1e3,
        one_by_one * 1e3,
        story.total_seconds * 1e3,
        story.first_layer_seconds * 1e3
    )?;
    let damage = &story.damage;
    writeln!(
        out,
        "5. One bit was flipped on disk, in {} at {}. The next read returned the {} blocks before the\n   \
         damage and a miss for block {} ({}); look-ups now find {} blocks. No wrong byte was delivered.",
        damage.file,
        damage.offset,
        damage.usable_blocks,
        damage.block,
        damage.reason,
        damage.blocks_matched_afterwards
    )?;
    writeln!(
        out,
        "6. The server was stopped, and `kvarts fsck` found the damage too (exit code {}):",
        story.fsck_exit
    )?;
    for finding in story.fsck_findings.iter().take(4) {
        writeln!(out, "     {finding}")?;
    }
    Ok(writeln!(out, "\nThe demonstration took {:.1} s.", story.seconds)?)
}

/// Draws each layer over time: `-` until it has arrived, `#` while it is used.
fn timeline(story: &Story, out: &mut dyn Write) -> Result<(), Failure> {
    let step = story.timeline.len().div_ceil(LINES).max(1);
    let column = |at: f64| ((at / story.total_seconds.max(1e-9)) * WIDTH as f64).round() as usize;
    writeln!(out, "   layer 0 ms{:>width$.0} ms", story.total_seconds * 1e3, width = WIDTH - 4)?;
    for layer in story.timeline.iter().step_by(step) {
        let (arrived, began) = (column(layer.arrived), column(layer.began));
        let used = column(layer.ended).saturating_sub(began).max(1);
        let line = "-".repeat(arrived) + &" ".repeat(began.saturating_sub(arrived)) + &"#".repeat(used);
        writeln!(out, "   {:>5} {line}", layer.layer)?;
    }
    Ok(writeln!(out, "         -: being read from disk    #: used")?)
}
