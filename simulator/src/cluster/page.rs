//! A run as one page: figures and plots, without anything from elsewhere.

use std::fmt::Write;

use serde_json::{Map, Value};

use super::figures::{Counted, Histogram};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 240.0;
const EDGE: f64 = 48.0;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:52em;margin:2em auto;padding:0 1em;color:#222}\
table{border-collapse:collapse}td,th{padding:.15em .8em;border-bottom:1px solid #ddd;text-align:left}\
td+td{text-align:right;font-variant-numeric:tabular-nums}svg{background:#fafafa;margin:.5em 0}";

/// The page of one run.
pub fn page(title: &str, figures: &Map<String, Value>, counted: &Counted) -> String {
    let mut html = String::new();
    let title = escape(title);
    let _ = write!(
        html,
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
    );
    html.push_str("<h2>Time to the first token</h2>");
    let curves = [("first token", &counted.ttft), ("request", &counted.step), ("session", &counted.task)];
    html.push_str(&distribution(&curves, "ms"));
    html.push_str("<h2>Time for each further token</h2>");
    html.push_str(&distribution(&[("token", &counted.tpot)], "ms"));
    let seconds = |place: usize| place as f64 * counted.slice_ms / 1e3;
    let over_time = |of: &dyn Fn(&super::Slice) -> Option<f64>| -> Vec<(f64, f64)> {
        let slices = counted.slices.iter().enumerate();
        slices.filter_map(|(place, slice)| of(slice).map(|value| (seconds(place), value))).collect()
    };
    html.push_str("<h2>Hits over time (fraction of the requested blocks)</h2>");
    html.push_str(&lines(
        &over_time(&|slice| (slice.blocks > 0).then(|| slice.hits as f64 / slice.blocks as f64)),
        "s",
    ));
    html.push_str("<h2>Mean time to the first token over time (ms)</h2>");
    html.push_str(&lines(
        &over_time(&|slice| (slice.ended > 0).then(|| slice.ttft_ms / slice.ended as f64)),
        "s",
    ));
    html.push_str("<h2>Figures</h2><table>");
    rows(&mut html, "", figures);
    html.push_str("</table></html>\n");
    html
}

fn rows(html: &mut String, before: &str, figures: &Map<String, Value>) {
    for (name, value) in figures {
        match value {
            Value::Object(inner) => rows(html, &format!("{before}{name}."), inner),
            value => {
                let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                let _ = write!(
                    html,
                    "<tr><td>{}</td><td>{}</td></tr>",
                    escape(&format!("{before}{name}")),
                    escape(&shown)
                );
            }
        }
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

const COLOURS: [&str; 3] = ["#1f6feb", "#d1242f", "#2da44e"];

/// Parts of all by time, on a logarithmic scale.
fn distribution(curves: &[(&str, &Histogram)], unit: &str) -> String {
    let all: Vec<(&str, Vec<(f64, f64)>)> = curves
        .iter()
        .filter(|(_, histogram)| histogram.count() > 0)
        .map(|(name, histogram)| {
            (*name, histogram.points().into_iter().map(|(x, y)| (x.max(1e-3).log10(), y)).collect())
        })
        .collect();
    plot(&all, &|x| format!("{} {unit}", short(10f64.powf(x))), Some((0.0, 1.0)))
}

fn lines(points: &[(f64, f64)], unit: &str) -> String {
    plot(&[("", points.to_vec())], &|x| format!("{} {unit}", short(x)), None)
}

fn short(value: f64) -> String {
    if value >= 100.0 || value == 0.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// Curves in one frame.
fn plot(
    curves: &[(&str, Vec<(f64, f64)>)],
    shown: &dyn Fn(f64) -> String,
    range: Option<(f64, f64)>,
) -> String {
    let points = || curves.iter().flat_map(|(_, points)| points);
    if points().next().is_none() {
        return "<p>There are no measurements.</p>".to_owned();
    }
    let span = |values: &mut dyn Iterator<Item = f64>| {
        values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
    };
    let (left, right) = span(&mut points().map(|(x, _)| *x));
    let (low, high) = range.unwrap_or((0.0, span(&mut points().map(|(_, y)| *y)).1.max(1e-9)));
    let wide = (right - left).max(1e-9);
    let x = |value: f64| EDGE + (value - left) / wide * (WIDTH - 2.0 * EDGE);
    let y = |value: f64| HEIGHT - EDGE / 2.0 - (value - low) / (high - low).max(1e-9) * (HEIGHT - EDGE);
    let mut svg = format!("<svg width=\"{WIDTH}\" height=\"{HEIGHT}\" font-size=\"11\">");
    for part in 0..=4 {
        let part = f64::from(part) / 4.0;
        let (at, value) = (low + part * (high - low), left + part * wide);
        let _ = write!(
            svg,
            "<line x1=\"{EDGE}\" x2=\"{:.1}\" y1=\"{1:.1}\" y2=\"{1:.1}\" stroke=\"#ddd\"/><text x=\"4\" y=\"{1:.1}\">{2}</text>\
             <text x=\"{3:.1}\" y=\"{4:.1}\" text-anchor=\"middle\">{5}</text>",
            WIDTH - EDGE,
            y(at),
            short(at),
            x(value),
            HEIGHT - 6.0,
            shown(value)
        );
    }
    for ((name, points), colour) in curves.iter().zip(COLOURS.iter().cycle()) {
        let path: Vec<String> =
            points.iter().map(|(px, py)| format!("{:.1},{:.1}", x(*px), y(*py))).collect();
        let _ = write!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\" points=\"{}\"/>",
            path.join(" ")
        );
        if let Some((px, py)) = points.get(points.len() / 2) {
            let _ = write!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{}</text>",
                x(*px) + 4.0,
                y(*py) - 4.0,
                escape(name)
            );
        }
    }
    svg.push_str("</svg>");
    svg
}
