//! Small clusters whose figures can be counted by hand, the same bytes from the same seed, and clear words for what is
//! no cluster.
use kvarts_simulator::cluster::work::{SessionWork, Sessions, TraceWork};
use kvarts_simulator::cluster::*;
use kvarts_simulator::trace::{Request, TraceError};

const FILE: &str = include_str!("cluster.toml");

fn cluster(change: impl FnOnce(&mut Cluster)) -> Cluster {
    let mut cluster = Cluster::parse(FILE).unwrap();
    change(&mut cluster);
    cluster
}

fn request(at_ms: f64, blocks: &[u64], output_tokens: u64) -> Result<Request, TraceError> {
    Ok(Request {
        at_ms,
        input_tokens: blocks.len() as u64 * 512,
        output_tokens,
        blocks: blocks.to_vec(),
        ..Request::default()
    })
}

fn run(cluster: &Cluster, requests: Vec<Result<Request, TraceError>>) -> Counted {
    let work = TraceWork::new(requests.into_iter(), 1.0);
    Simulation::new(cluster, work, 1).unwrap().run(|_, _| ()).unwrap()
}

#[test]
fn clients_wait_for_their_answers_and_times_are_told_by_type() {
    let cluster = cluster(|cluster| cluster.nodes.mixed = 2);
    let kinds: [std::sync::Arc<str>; 2] = ["new".into(), "turn".into()];
    let requests: Vec<Request> = (0..12u64)
        .map(|n| {
            // Six conversations of two turns; the second turn has the blocks of the first, and as many again.
            let (chat, turn) = (n % 6, n / 6);
            Request {
                chat: Some(n),
                parent: turn.checked_sub(1).map(|_| chat),
                kind: Some(kinds[turn as usize].clone()),
                ..request(0.0, &(chat * 32..chat * 32 + 16 * (turn + 1)).collect::<Vec<_>>(), 2).unwrap()
            }
        })
        .collect();
    let run = |clients| {
        let work = clients::ClientWork::new(requests.iter().cloned().map(Ok), clients).unwrap();
        Simulation::new(&cluster, work, 1).unwrap().run(|_, _| ()).unwrap()
    };
    let [one, three] = [run(1), run(3)];
    for (counted, clients) in [(&one, 1), (&three, 3)] {
        assert_eq!((counted.requests, counted.refused, counted.open_max), (12, 0, clients));
        let json = counted.json(&cluster);
        let by_type = json["ttft_ms_by_type"].as_object().unwrap();
        assert_eq!(by_type.keys().collect::<Vec<_>>(), ["new", "turn"], "{json:?}");
    }
    // With one client nothing waits: each request takes its own time.
    let [new, turn] = kinds.each_ref().map(|kind| &one.ttft_by_kind[kind]);
    assert!((new.count(), turn.count()) == (6, 6) && new.percentile(0.0) > new.percentile(1.0) * 0.98);
    assert!(three.end_ms < one.end_ms * 0.7, "{} and {}", three.end_ms, one.end_ms);
    let more = std::iter::repeat_with(|| request(0.0, &[1], 1)).take(clients::REQUESTS_MAX + 1);
    assert!(clients::ClientWork::new(more, 1).unwrap_err().to_string().contains("more than 1000000"));
}

fn sessions(cluster: &Cluster, sessions: Sessions) -> Counted {
    let work = SessionWork::new(sessions, cluster.block_tokens);
    Simulation::new(cluster, work, sessions.seed).unwrap().run(|_, _| ()).unwrap()
}

#[test]
fn one_request_takes_its_prefill_and_its_tokens_and_the_next_one_finds_its_blocks() {
    use kvarts_planner::cost::{Decode, Prefill};
    let cluster = cluster(|cluster| cluster.nodes.mixed = 1);
    let blocks: Vec<u64> = (0..8).collect();
    let counted = run(&cluster, vec![request(0.0, &blocks, 1), request(60_000.0, &blocks, 11)]);
    let times = cluster.facts().unwrap().times;
    assert_eq!((counted.requests, counted.hits.hbm, counted.hits.miss), (2, 7, 9));
    let without =
        Cluster { engine: Engine { prefix_caching: false, ..Engine::default() }, ..cluster.clone() };
    let without = run(&without, vec![request(0.0, &blocks, 1), request(60_000.0, &blocks, 11)]);
    assert_eq!((without.hits.hbm, without.hits.dram, without.hits.miss), (0, 7, 9));
    // The last token is always computed, and with it its block.
    assert!((counted.ttft.percentile(1.0) / times.prefill_ms(0, 4096) - 1.0).abs() < 0.02);
    assert!((counted.ttft.percentile(0.5) / times.prefill_ms(3584, 512) - 1.0).abs() < 0.02);
    assert!((counted.tpot.mean() / times.decode_ms(1, 4101) - 1.0).abs() < 0.01);
    // Eight blocks of 64 MiB, once.
    assert_eq!(counted.disk_bytes_written, 8 * (64 << 20));
    assert_eq!(counted.computed_tokens, 4096 + 512);
}

#[test]
fn what_left_device_memory_comes_from_memory_then_from_disk_then_from_a_peer() {
    let many: Vec<_> = (0..40u64)
        .map(|n| request(n as f64 * 5000.0, &(n * 16..n * 16 + 16).collect::<Vec<_>>(), 1))
        .collect();
    let again = |router| {
        let cluster = cluster(|cluster| {
            cluster.nodes.mixed = 1 + u32::from(router == RouterKind::RoundRobin);
            cluster.router = router;
            cluster.hbm.gb = 2.5;
            cluster.dram.as_mut().unwrap().gb = 5.0;
        });
        let mut requests = many.clone();
        for old in [0u64, 34] {
            requests.push(request(
                300_000.0 + old as f64 * 5000.0,
                &(old * 16..old * 16 + 16).collect::<Vec<_>>(),
                1,
            ));
        }
        run(&cluster, requests).hits
    };
    let one = again(RouterKind::CacheAware);
    assert!(one.disk >= 15 && one.dram + one.disk >= 25, "{one:?}");
    let two = again(RouterKind::RoundRobin);
    assert!(two.peer + two.disk >= 15, "{two:?}");
}

#[test]
fn the_same_seed_gives_the_same_bytes_for_every_router_and_another_seed_gives_others() {
    let of = Sessions { count: 60, turns: 4.0, ..Sessions::named("chat").unwrap() };
    for router in RouterKind::ALL {
        let cluster = cluster(|cluster| {
            cluster.router = router;
            cluster.nodes.mixed = 4;
        });
        let text = |seed| {
            let counted = sessions(&cluster, Sessions { seed, ..of });
            assert_eq!((counted.sessions, counted.refused), (60, 0), "{}", router.name());
            let figures = counted.json(&cluster);
            page("run", &figures, &counted) + &serde_json::to_string(&figures).unwrap()
        };
        assert_eq!(text(1), text(1), "{}", router.name());
        assert_ne!(text(1), text(2), "{}", router.name());
    }
}

#[test]
fn every_request_ends_under_every_prefetch_policy_and_with_prefill_and_decode_apart() {
    let of = Sessions { count: 50, per_second: 5.0, think_ms: 100.0, ..Sessions::named("coding").unwrap() };
    let policies = [
        Prefetch::Overlap,
        Prefetch::WaitComplete,
        Prefetch::BestEffort,
        Prefetch::Timeout,
        Prefetch::Blocking,
        Prefetch::Layerwise,
    ];
    for prefetch in policies {
        for (mixed, prefill, decode) in [(3, 0, 0), (0, 2, 1), (1, 1, 1)] {
            let cluster = cluster(|cluster| {
                cluster.engine.prefetch = prefetch;
                (cluster.nodes.mixed, cluster.nodes.prefill, cluster.nodes.decode) = (mixed, prefill, decode);
                cluster.hbm.gb = 25.0;
                cluster.dram.as_mut().unwrap().gb = 30.0;
                cluster.cold = Some(Cold { gb: 1e5, gb_per_s: 5.0, latency_ms: 5.0 });
                cluster.dual_path = true;
            });
            let counted = sessions(&cluster, of);
            assert_eq!(counted.sessions, 50, "{prefetch:?} {mixed} {prefill} {decode}");
            assert_eq!(counted.ttft.count(), counted.requests);
            assert!(counted.hit_rate() > 0.5, "{prefetch:?}: {}", counted.hit_rate());
            assert!(counted.computed_tokens <= counted.input_tokens);
        }
    }
}

#[test]
fn a_node_that_decodes_only_takes_room_for_answers_as_they_grow_and_stops_those_that_came_last() {
    let apart = |gb: f64| {
        cluster(|cluster| {
            (cluster.nodes.mixed, cluster.nodes.prefill, cluster.nodes.decode) = (0, 1, 1);
            cluster.hbm.gb = gb;
        })
    };
    // Ten requests of one block and of answers of three more: forty blocks of 64 MiB if room were kept for whole answers.
    let requests: Vec<_> = (0..10u64).map(|n| request(0.0, &[n], 1536)).collect();
    let roomy = run(&apart(40.0), requests.clone());
    assert_eq!((roomy.requests, roomy.preemptions), (10, 0));
    // Room for 24: all of them begin at once, and some are stopped when their answers have grown.
    let short = run(&apart(24.5 * 0.067_108_864), requests.clone());
    assert_eq!(short.requests, 10);
    assert!(short.preemptions > 0);
    assert!(
        short.ttft.percentile(1.0) < 1.1 * roomy.ttft.percentile(1.0),
        "the first tokens come from the other node"
    );
    // Half of them fit whole: with room kept for whole answers the others would have waited for these to end.
    assert!(short.end_ms < 1.9 * roomy.end_ms, "{} and {}", short.end_ms, roomy.end_ms);
    // As many as the engine takes at once.
    let narrow = Cluster { engine: Engine { batch_max: 5, ..Engine::default() }, ..apart(40.0) };
    let narrow = run(&narrow, requests);
    assert!(narrow.end_ms > 1.5 * roomy.end_ms, "{} and {}", narrow.end_ms, roomy.end_ms);
}

#[test]
fn with_room_in_host_memory_what_was_stopped_is_copied_there_and_back_and_never_computed_again() {
    let swapping = |swap_gb: f64, gb_per_s: f64| {
        let cluster = cluster(|cluster| {
            cluster.nodes.mixed = 1;
            (cluster.disk, cluster.network) = (None, None);
            cluster.hbm.gb = 24.5 * 0.067_108_864;
            cluster.dram = Some(Memory { gb: 0.0, gb_per_s, latency_ms: 0.0 });
            (cluster.engine.swap_gb, cluster.engine.chunk_tokens) = (swap_gb, 700);
        });
        // Ten requests of a block and a half and of answers of three more.
        let requests =
            (0..10u64).map(|n| Ok(Request { input_tokens: 800, ..request(0.0, &[n], 1536).unwrap() }));
        let work = TraceWork::new(requests, 1.0);
        let counted = Simulation::new(&cluster, work, 1).unwrap().recording().run(|_, _| ()).unwrap();
        assert_eq!((counted.requests, counted.refused), (10, 0));
        let steps = counted.schedule.iter().flatten();
        let tokens: u64 = steps.flat_map(|step| &step.tokens).map(|(_, tokens)| tokens).sum();
        (counted, tokens)
    };
    let least = 10 * (800 + 1535);
    let (again, tokens) = swapping(0.0, 50.0);
    assert!(again.preemptions > 0 && again.swapped_bytes == 0 && tokens > least, "{tokens}");
    let (copied, tokens) = swapping(10.0, 50.0);
    assert!(copied.preemptions > 0);
    assert_eq!(tokens, least, "nothing is computed twice");
    // Copies take their time, and steps wait for them.
    let (slow, _) = swapping(10.0, 0.5);
    assert_eq!(slow.swapped_bytes, copied.swapped_bytes);
    let longer = slow.swapped_bytes as f64 * (1.0 / 0.5e6 - 1.0 / 50e6);
    assert!((slow.end_ms - copied.end_ms - longer).abs() < 1e-3 * longer, "{longer}");
    // Room for the state of one: others are computed again.
    let (one, tokens) = swapping(4.5 * 0.067_108_864, 50.0);
    assert!(one.swapped_bytes > 0 && one.swapped_bytes < copied.swapped_bytes && tokens > least, "{tokens}");
}

#[test]
fn a_load_in_the_step_makes_the_step_wait_for_all_of_it_or_for_each_layer() {
    use kvarts_planner::cost::Prefill;
    let blocks: Vec<u64> = (0..64).collect();
    let ttft = |prefetch| {
        let cluster = cluster(|cluster| {
            cluster.nodes.mixed = 1;
            (cluster.hbm.gb, cluster.dram) = (6.0, None);
            cluster.engine.prefetch = prefetch;
            cluster.engine.plans = false;
        });
        // Others fill the memory in between, so that the last one is read from disk.
        let other = |n: u64| (1000 * n..1000 * n + 64).collect::<Vec<_>>();
        let mut requests = vec![request(0.0, &blocks, 1)];
        requests.extend((1..4).map(|n| request(n as f64 * 60_000.0, &other(n), 1)));
        requests.push(request(600_000.0, &blocks, 1));
        let counted = run(&cluster, requests);
        assert_eq!((counted.requests, counted.hits.disk), (5, 63), "{prefetch:?}");
        counted.ttft.percentile(0.01)
    };
    let times = cluster(|_| ()).facts().unwrap().times;
    let (load, compute) = (0.1 + 63.0 * 67.108_864 / 12.0, times.prefill_ms(63 * 512, 512));
    let near =
        |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 0.02, "{found} for {expected}");
    near(ttft(Prefetch::Blocking), load + compute);
    near(ttft(Prefetch::Layerwise), load + compute / 32.0);
    near(ttft(Prefetch::WaitComplete), load + compute);
}

#[test]
fn the_work_grows_with_requests_and_open_requests_do_not() {
    let cluster = cluster(|cluster| cluster.nodes.mixed = 4);
    let run =
        |count| sessions(&cluster, Sessions { count, per_second: 2.0, ..Sessions::named("chat").unwrap() });
    let (small, large) = (run(100), run(400));
    assert!(large.events < 6 * small.events, "{} and {}", small.events, large.events);
    assert!(large.open_max < 3 * small.open_max + 20, "{} and {}", small.open_max, large.open_max);
}

#[test]
fn a_request_that_fits_nowhere_is_refused_and_counted() {
    let cluster = cluster(|cluster| cluster.hbm.gb = 1.0);
    let counted =
        run(&cluster, vec![request(0.0, &(0..100).collect::<Vec<_>>(), 5), request(1.0, &[1, 2], 5)]);
    assert_eq!((counted.refused, counted.requests), (1, 1));
}

/// They were taken for one dense stream: deepseek-v4-pro with 1.35 MiB a block instead of 8 MiB, each boundary a hit for nothing.
#[test]
fn a_model_with_windows_states_or_tails_is_refused_and_it_is_said_why_and_which_are_taken() {
    let told = |model: &str| {
        let file = FILE.replace("llama-3.1-8b", model);
        let file = file.replace("devices = 1", "devices = 1024");
        Cluster::parse(&file).map(drop).map_err(|error| error.to_string())
    };
    let mut taken = Vec::new();
    for name in kvarts_layout::spec::shipped::names() {
        let spec = kvarts_layout::spec::shipped::load(name).unwrap();
        let keeps = spec.geometry().boundary_bytes(512).unwrap();
        match told(name) {
            Ok(()) => taken.push(name),
            Err(why) if keeps > 0 => {
                let begins =
                    format!("model: {name} has windows, states or tails ({keeps} bytes at each boundary");
                assert!(why.starts_with(&begins) && why.contains("supported models are"), "{why}");
            }
            Err(why) => panic!("{name}: {why}"),
        }
        assert_eq!(taken.last() == Some(&name), keeps == 0, "{name}");
    }
    let all = told("deepseek-v4-pro").unwrap_err();
    assert!(taken.len() == 11 && taken.iter().all(|name| all.contains(name)), "{taken:?}: {all}");
}

#[test]
fn what_is_no_cluster_is_told_with_its_place() {
    let told = |from: &str, to: &str| {
        assert!(FILE.contains(from), "{from}");
        Cluster::parse(&FILE.replace(from, to)).unwrap_err().to_string()
    };
    assert!(
        told("mixed = 2", "mixd = 2").starts_with("line 5: unknown field `mixd`"),
        "{}",
        told("mixed = 2", "mixd = 2")
    );
    assert!(told("mixed = 2", "mixed = 0").starts_with("nodes: the total is 0"));
    assert!(told("mixed = 2", "prefill = 2").starts_with("nodes: prefill and decode are needed together"));
    assert!(told("gb_per_s = 12.0", "gb_per_s = -1.0").starts_with("disk.gb_per_s: the value is -1"));
    assert!(told("gb_per_s = 25.0", "gb_per_s = nan").starts_with("network.gb_per_s: the value is NaN"));
    assert!(
        told("h100", "h1000").starts_with("device: no device is named `h1000`; the possible names are a100")
    );
    assert!(told("llama-3.1-8b", "lama").starts_with("model: no model is named `lama`"));
    let measured = |step: &str| {
        let table = format!("{FILE}[measured]\nblock_bytes = 65536\nlayers = 4\nstep_ms = {step}\n");
        Cluster::parse(&table.replace("llama-3.1-8b", "my own"))
    };
    assert!(measured("2.5").is_ok());
    let error = measured("-1.0").unwrap_err().to_string();
    assert!(error.starts_with("measured.step_ms: the value is -1"), "{error}");
    assert!(told("[disk]", "[disk").starts_with("line 13: "), "{}", told("[disk]", "[disk"));
}

#[test]
fn weights_and_state_fit_into_the_devices_or_it_is_told_with_the_numbers() {
    let with = |sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        Cluster::parse_with(FILE, &sets).map(drop).map_err(|error| error.to_string())
    };
    let no = |what: &str| Err(format!("hbm.gb: {what}"));
    assert_eq!(
        with(&["hbm.gb=64"]),
        no("64 GB for state and 16.1 GB of weights of llama-3.1-8b do not fit into the 80 GB of 1 x h100")
    );
    assert_eq!(with(&["hbm.gb=63.9"]), Ok(()));
    assert_eq!(
        with(&["model=llama-3.1-70b"]),
        no("40 GB for state and 141.2 GB of weights of llama-3.1-70b do not fit into the 80 GB of 1 x h100")
    );
    assert_eq!(with(&["model=llama-3.1-70b", "nodes.devices=4"]), Ok(()));
    // What was measured says nothing of weights.
    let table = "[measured]\nblock_bytes = 65536\nlayers = 4\nstep_ms = 1.0\n";
    assert!(Cluster::parse_with(&(FILE.to_owned() + table), &["hbm.gb=400".to_owned()]).is_ok());
}

#[test]
fn what_goes_between_nodes_needs_a_network() {
    let without = FILE.replace("[network]\ngb_per_s = 25.0\n", "");
    let with = |sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        Cluster::parse_with(&without, &sets).map(drop).map_err(|error| error.to_string())
    };
    let no = |what: &str| Err(format!("{what}, but the network is missing: add [network] with gb_per_s"));
    // Nodes that have nothing to do with each other need none.
    assert_eq!(with(&[]), Ok(()));
    let apart = ["nodes.mixed=0", "nodes.prefill=1", "nodes.decode=1"];
    let moved = "nodes: state is sent from prefill nodes to decode nodes";
    assert_eq!(with(&apart), no(moved));
    assert_eq!(with(&["nodes.prefill=1", "nodes.decode=1"]), no(moved));
    assert_eq!(with(&[&apart[..], &["network.gb_per_s=25"]].concat()), Ok(()));
    let owned = "disk.single_owner: nodes read each other's blocks";
    assert_eq!(with(&["disk.single_owner=true"]), no(owned));
    assert_eq!(with(&["dual_path=true"]), no("dual_path: nodes read through each other's paths"));
    assert_eq!(with(&["dual_path=true", "disk.single_owner=true", "nodes.mixed=1"]), Ok(()));
}

#[test]
fn with_a_single_owner_there_is_one_copy_of_a_block_on_disk_and_the_others_read_it_from_there() {
    let copies = |single| {
        let cluster = cluster(|cluster| {
            cluster.router = RouterKind::RoundRobin;
            cluster.dram = None;
            cluster.hbm.gb = 2.5;
            // The holder's disk is slow enough for plans to compute some of it.
            cluster.engine.plans = false;
            cluster.disk.as_mut().unwrap().single_owner = single;
        });
        // Each prompt comes to one node and then to the other.
        let requests = (0..40u64).map(|n| {
            let first = n / 2 * 16;
            request(n as f64 * 5000.0, &(first..first + 16).collect::<Vec<_>>(), 1)
        });
        let counted = run(&cluster, requests.collect());
        assert_eq!(counted.hits.peer, 20 * 15, "single: {single}");
        counted.disk_bytes_written / (64 << 20)
    };
    // The last block of a prompt is computed again by the second node: it is the only one that it may write.
    assert_eq!((copies(false), copies(true)), (2 * 320, 320));
}

#[test]
fn values_in_place_of_a_file_s_are_checked_as_the_file_is() {
    let with = |sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        Cluster::parse_with(FILE, &sets).map_err(|error| error.to_string())
    };
    let cluster = with(&[
        "disk.gb_per_s=24",
        "engine.prefetch=layerwise",
        "dual_path=true",
        "cold.gb=5",
        "cold.gb_per_s=0.5",
    ]);
    let cluster = cluster.unwrap();
    assert_eq!((cluster.disk.unwrap().gb_per_s, cluster.disk.unwrap().gb), (24.0, 2000.0));
    assert_eq!((cluster.engine.prefetch, cluster.dual_path), (Prefetch::Layerwise, true));
    assert_eq!(cluster.cold, Some(Cold { gb: 5.0, gb_per_s: 0.5, latency_ms: 0.0 }));
    assert_eq!(with(&[]).unwrap(), Cluster::parse(FILE).unwrap());
    assert_eq!(
        with(&["hbm.gb"]).unwrap_err(),
        "`hbm.gb`: the setting has no value: write `table.name=value`"
    );
    assert!(with(&["hbm.gbs=3"]).unwrap_err().starts_with("`hbm.gbs=3`: unknown field `gbs`"));
    assert!(with(&["model.name=3"]).unwrap_err().ends_with("`model` is not a table"));
    assert!(with(&["disk.drives=0"]).unwrap_err().starts_with("disk.drives: the value is 0"));
    assert!(with(&["nodes.devices=0"]).unwrap_err().starts_with("nodes.devices: the value is 0"));
}

#[test]
fn a_session_s_next_turn_waits_for_the_answer() {
    let cluster = cluster(|_| ());
    let work = SessionWork::new(
        Sessions { count: 1, turns: 3.0, spread: 0.0, think_ms: 0.0, ..Sessions::default() },
        512,
    );
    let counted = Simulation::new(&cluster, work, 1).unwrap().run(|_, _| ()).unwrap();
    assert_eq!((counted.requests, counted.sessions), (3, 1));
    assert!((counted.task.mean() - 3.0 * counted.step.mean()).abs() < 1.0);
}
