//! How long a plan takes to find: `cargo bench -p kvarts-planner`. The least of many rounds is told: other programs of the
//! machine make others longer.
#![allow(clippy::disallowed_methods, reason = "measures time")]

use std::hint::black_box;
use std::time::Instant;

use kvarts_layout::Group;
use kvarts_layout::prefix::{Absence, Need};
use kvarts_planner::cost::{Interpolated, Prefill, Roofline, Sample, device, model};
use kvarts_planner::plan::{Link, Links, Overlap, Part, Question, Run, Source, Sources};

const ROUNDS: u32 = 200;
const PLANS: u32 = 20;

fn main() {
    let (Some(model), Some(device)) = (model("llama-3.1-8b"), device("h100")) else { return };
    let roofline = Roofline::new(model, device, 1);
    let grid = [0u64, 4096, 16_384, 65_536]
        .into_iter()
        .flat_map(|cached| [64u64, 1024, 8192].map(|new| (cached, new)));
    let samples: Vec<Sample> =
        grid.map(|(cached, new)| Sample { cached, new, ms: roofline.prefill_ms(cached, new) }).collect();
    let Ok(interpolated) = Interpolated::new(&samples) else { return };
    let (streams, windows) = ([1u64 << 20; 61], [74_752u64; 61]);
    for blocks in [100u32, 1000, 4000] {
        for (name, table) in [("roofline", &roofline as &dyn Prefill), ("interpolated", &interpolated)] {
            for rate in [1.0, 4.0, 12.0, 50.0] {
                let disk = Sources::of(Source::Disk);
                let runs = [
                    Run { from: 0, to: blocks / 4, sources: Sources::of(Source::Dram) },
                    Run { from: blocks / 4, to: blocks, sources: disk },
                ];
                let ends: Vec<Run> =
                    (1..=blocks / 16).map(|n| Run { from: n * 16 - 1, to: n * 16, sources: disk }).collect();
                let part = |group, need, absence, layer_bytes, runs| Part {
                    group: Group(group),
                    need,
                    absence,
                    layer_bytes,
                    runs,
                };
                let parts = [
                    part(0, Need::All, Absence::Required, &streams[..], &runs[..]),
                    part(1, Need::At, Absence::Recompute { tokens: 7808 }, &windows[..], &ends[..]),
                ];
                let links = Links::NONE
                    .with(Source::Dram, Link::gb_per_s(50.0, 0.02))
                    .with(Source::Disk, Link::gb_per_s(rate, 0.2));
                let prompt_tokens = u64::from(blocks) * 256 + 300;
                let question = Question {
                    block_tokens: 256,
                    prompt_tokens,
                    parts: &parts,
                    links: &links,
                    overlap: Overlap::Layers,
                };
                let (mut least, mut looked) = (f64::INFINITY, 0);
                for _ in 0..ROUNDS {
                    let begin = Instant::now();
                    for _ in 0..PLANS {
                        looked = black_box(&question).plan(table).map_or(0, |plan| plan.looked_at);
                    }
                    least = least.min(begin.elapsed().as_secs_f64() * 1e6 / f64::from(PLANS));
                }
                println!("{blocks:5} blocks, {name:12} {rate:4} GB/s: {least:7.2} us, {looked} candidates");
            }
        }
    }
}
