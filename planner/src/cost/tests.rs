//! Tables repeat what they were made from, fall where they must, say their errors, and refuse what is no sample.
use super::*;
use proptest::prelude::*;

fn llama() -> Roofline {
    Roofline::new(model("llama-3.1-8b").unwrap(), device("h100").unwrap(), 1)
}

fn sample(cached: u64, new: u64, ms: f64) -> Sample {
    Sample { cached, new, ms }
}

#[test]
fn a_roofline_is_arithmetic_for_long_prompts_and_bytes_for_short_ones() {
    let roofline = llama();
    // 2 x 8.03e9 x 8192 operations and 4 x 32 x 4096 for each of 8192^2 / 2 pairs, at half of 989e12 a second.
    let flops = 2.0 * 8.03e9 * 8192.0 + 4.0 * 32.0 * 4096.0 * 8192.0 * 4096.0;
    let expected = 2.0 + flops / (989e9 * 0.5);
    assert!((roofline.prefill_ms(0, 8192) - expected).abs() < 1e-9 * expected);
    // One token reads all weights: 16.06e9 bytes at 0.7 of 3350e9 a second.
    let expected = 2.0 + 8.03e9 * 2.0 / (3350e6 * 0.7);
    assert!((roofline.prefill_ms(0, 1) - expected).abs() < 1e-9 * expected);
    assert_eq!((roofline.prefill_ms(100, 0), roofline.decode_ms(0, 0)), (0.0, 0.0));
    assert!(roofline.decode_ms(64, 64 * 8192) > roofline.decode_ms(64, 64));
    let shared = Roofline::new(model("llama-3.1-8b").unwrap(), device("h100").unwrap(), 2);
    assert!(shared.prefill_ms(0, 8192) < roofline.prefill_ms(0, 8192));
    assert_eq!(roofline.told().to_string(), "roofline without measured times, so the error is not known");
}

#[test]
fn a_step_reads_weights_once_for_all_its_sequences() {
    let roofline = llama();
    let step_of = |prefills: &[(u64, u64)], (batch, context)| {
        let mut step = Step::default();
        prefills.iter().for_each(|(cached, new)| roofline.prefill(&mut step, *cached, *new));
        roofline.decode(&mut step, batch, context);
        roofline.step_ms(&step)
    };
    assert_eq!(step_of(&[(100, 50)], (0, 0)), roofline.prefill_ms(100, 50));
    assert_eq!(step_of(&[], (7, 900)), roofline.decode_ms(7, 900));
    // Short prefills of many sequences take little more than one: reading the weights is most of it.
    let many = step_of(&[(4096, 16); 8], (4, 4 * 4096));
    assert!(many < 1.3 * roofline.prefill_ms(4096, 16), "{many}");
    // What is bound by arithmetic adds up.
    let (two, one) = (step_of(&[(0, 8192); 2], (0, 0)), step_of(&[(0, 8192)], (0, 0)));
    assert!(((two - 2.0) / (one - 2.0) - 2.0).abs() < 1e-9);
}

#[test]
fn sparse_attention_reads_and_computes_the_index_of_all_tokens_and_the_rest_of_those_it_chooses() {
    let of = model("deepseek-v3.2").unwrap();
    let (sparse, device) = (of.sparse.unwrap(), device("h100").unwrap());
    let ms = |bytes: f64| bytes / (3350e6 * 0.7);
    let roofline = Roofline::new(of, device, 1);
    // 64 sequences of 32,768 tokens: all weights, an index of every token, and 2,048 whole tokens of each sequence.
    let (batch, context) = (64.0, 64.0 * 32_768.0);
    let read = sparse.index_bytes * context + (of.kv_bytes - sparse.index_bytes) * batch * 2048.0;
    let expected = 2.0 + ms(of.params + read);
    assert!((roofline.decode_ms(64, 64 * 32_768) / expected - 1.0).abs() < 1e-9);
    // What is longer costs no more than its index.
    let more = roofline.prefill_ms(65_536, 4096) - roofline.prefill_ms(32_768, 4096);
    let index = of.attention_flops * 4096.0 * 32_768.0 / (989e9 * 0.5);
    assert!((more / index - 1.0).abs() < 1e-6, "{more} for {index}");
    let unsound = Compute { sparse: Some(Sparse { index_bytes: 1e9, ..sparse }), ..of };
    assert!(roofline.is_sound() && !Roofline::new(unsound, device, 1).is_sound());
}

#[test]
fn a_scaled_roofline_has_the_factor_and_the_error_of_its_samples() {
    let roofline = llama();
    let times = |factor: f64| {
        [(0, 512), (4096, 512), (0, 8192)]
            .map(|(cached, new)| sample(cached, new, factor * roofline.prefill_ms(cached, new)))
    };
    let scaled = Scaled::new(roofline, &times(1.3)).unwrap();
    assert!((scaled.factor() - 1.3).abs() < 1e-9);
    assert!(scaled.told().error.unwrap() < 1e-9);
    let mut uneven = times(1.3);
    uneven[0].ms *= 1.2;
    let scaled = Scaled::new(roofline, &uneven).unwrap();
    let told = scaled.told();
    assert!((0.02..0.15).contains(&told.error.unwrap()) && told.error_max > told.error, "{told:?}");
    assert!(told.to_string().starts_with("scaled roofline from 3 samples, "), "{told}");
    assert_eq!(Scaled::new(roofline, &[]), Err(SampleError::None));
}

#[test]
fn samples_that_say_nothing_are_refused_by_their_place() {
    let refused = |samples: &[Sample]| Interpolated::new(samples).unwrap_err().to_string();
    assert_eq!(refused(&[]), "the list of samples is empty");
    for ms in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let told = refused(&[sample(0, 1, 1.0), sample(0, 2, ms)]);
        assert_eq!(told, "sample 2: `ms` must be above 0 and `new` at least 1");
    }
    assert!(refused(&[sample(5, 0, 1.0)]).starts_with("sample 1: "));
    let twice = refused(&[sample(1, 2, 3.0), sample(2, 2, 3.0), sample(1, 2, 4.0)]);
    assert_eq!(
        twice,
        "samples 1 and 3 have the same token counts: replace them by one sample with the median of their times"
    );
}

#[test]
fn an_interpolated_table_says_how_far_each_sample_is_off_what_the_others_say() {
    let roofline = llama();
    let mut samples = Vec::new();
    for cached in [0, 2048, 8192, 32_768] {
        for new in [64, 256, 1024, 4096] {
            samples.push(sample(cached, new, roofline.prefill_ms(cached, new)));
        }
    }
    let table = Interpolated::new(&samples).unwrap();
    let told = table.told();
    assert!(told.error.unwrap() < 0.3, "{told}");
    // In between it is near the truth.
    for (cached, new) in [(4096, 512), (1024, 2048), (16_384, 128)] {
        let (said, truth) = (table.prefill_ms(cached, new), roofline.prefill_ms(cached, new));
        assert!((said / truth - 1.0).abs() < 0.2, "{cached} {new}: {said} for {truth}");
    }
    assert_eq!(Interpolated::new(&samples[..1]).unwrap().told().error, None);
}

#[test]
fn of_samples_and_a_data_sheet_the_table_is_taken_that_is_less_off_the_samples() {
    let roofline = llama();
    let spread = |factor: fn(usize) -> f64| -> Vec<Sample> {
        let places = [0, 2048, 8192, 32_768].into_iter().flat_map(|c| [64, 1024, 4096].map(|n| (c, n)));
        let scaled =
            places.enumerate().map(|(at, (c, n))| sample(c, n, factor(at) * roofline.prefill_ms(c, n)));
        scaled.collect()
    };
    let kind = |samples: Vec<Sample>, sheet| Times::new(samples, sheet).unwrap().told().kind;
    assert_eq!(kind(spread(|_| 1.3), Some(roofline)), Kind::ScaledRoofline);
    assert_eq!(kind(spread(|_| 1.3), None), Kind::Interpolated);
    assert_eq!(kind(Vec::new(), Some(roofline)), Kind::Roofline);
    assert_eq!(kind(spread(|_| 1.3)[..1].to_vec(), Some(roofline)), Kind::ScaledRoofline);
    // An engine that is nothing like its data sheet.
    let odd = (0..12).map(|n| sample(0, 64 << n, 5.0)).collect();
    assert_eq!(kind(odd, Some(roofline)), Kind::Interpolated);
    assert_eq!(Times::new(Vec::new(), None), Err(SampleError::None));
    let unsound = Roofline::new(Compute { params: f64::NAN, ..*roofline.compute() }, *roofline.device(), 1);
    assert!(roofline.is_sound() && !unsound.is_sound());
}

proptest! {
    #[test]
    fn on_a_sample_an_interpolated_table_is_the_sample(
        raw in prop::collection::btree_map((0u64..100_000, 1u64..50_000), 0.1f64..1e5, 1..12)
    ) {
        let samples: Vec<Sample> = raw.iter().map(|((cached, new), ms)| sample(*cached, *new, *ms)).collect();
        let table = Interpolated::new(&samples).unwrap();
        for one in &samples {
            let said = table.prefill_ms(one.cached, one.new);
            prop_assert!((said / one.ms - 1.0).abs() < 1e-6, "{one:?}: {said}");
        }
    }

    /// What the search passes over by.
    #[test]
    fn no_prefill_is_below_the_least(
        raw in prop::collection::btree_map((0u64..10_000, 1u64..5000), 0.1f64..1e4, 1..10),
        prompt in 1u64..20_000, least in 0u64..20_000, most in 0u64..20_000,
    ) {
        let samples: Vec<Sample> = raw.iter().map(|((cached, new), ms)| sample(*cached, *new, *ms)).collect();
        let interpolated = Interpolated::new(&samples).unwrap();
        let scaled = Scaled::new(llama(), &samples).unwrap();
        let (cached, most) = (least.min(most).min(prompt - 1), least.max(most).min(prompt - 1));
        let sparse = Roofline::new(model("deepseek-v3.2").unwrap(), device("h100").unwrap(), 1);
        for table in [&interpolated as &dyn Prefill, &scaled, &llama(), &sparse] {
            let (bound, said) = (table.least_ms(prompt, most), table.prefill_ms(cached, prompt - cached));
            prop_assert!(bound <= said, "{table:?}: {said} below {bound}");
        }
    }
}
