//! Which command of a page is run where, what is laid before it, and how it must end.
//!
//! A scene is a directory of its own, whose steps are run in order. A page's placeholders (`DIR`, `FILE`, `TRACE`) are names of files
//! there; what a page leaves out (`...`, alternatives) is written out here.

/// How a step ends.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ends {
    /// With this exit code.
    With(i32),
    /// Not at all: it prints a line and serves.
    Serving,
    /// It is none: servers are ended.
    Stopped,
}

/// What is run of what a page shows.
#[derive(Clone, Copy, Debug)]
enum Run {
    AsItStands,
    /// With these arguments behind it.
    With(&'static str),
    /// This, which it stands for.
    As(&'static str),
}

#[derive(Debug)]
pub(super) struct Step {
    /// As the page shows it; empty for what is only laid.
    pub(super) shown: &'static str,
    run: Run,
    pub(super) ends: Ends,
    /// What its output must contain.
    pub(super) says: &'static [&'static str],
}

impl Step {
    pub(super) fn line(&self) -> String {
        match self.run {
            Run::AsItStands => self.shown.to_owned(),
            Run::With(more) => format!("{} {more}", self.shown),
            Run::As(line) => line.to_owned(),
        }
    }

    const fn with(self, more: &'static str) -> Self {
        Self { run: Run::With(more), ..self }
    }

    const fn standing_for(self, line: &'static str) -> Self {
        Self { run: Run::As(line), ..self }
    }

    const fn ends(self, code: i32) -> Self {
        Self { ends: Ends::With(code), ..self }
    }
}

const fn step(shown: &'static str, says: &'static [&'static str]) -> Step {
    Step { shown, run: Run::AsItStands, ends: Ends::With(0), says }
}

const fn lay(line: &'static str) -> Step {
    Step { shown: "", run: Run::As(line), ends: Ends::With(0), says: &[] }
}

const fn serves(shown: &'static str) -> Step {
    Step { shown, run: Run::AsItStands, ends: Ends::Serving, says: &["serving "] }
}

const STOP: Step = Step { shown: "", run: Run::As(""), ends: Ends::Stopped, says: &[] };

pub(super) struct Scene {
    pub(super) name: &'static str,
    pub(super) steps: &'static [Step],
}

/// A server that is small, in each scene.
const SMALL: &str = "--budget 256M --segment 16M";
/// An identity, tokens and blocks of a model.
const BLOCKS: &str = "kvarts identity --model llama-3.1-8b --revision demo --block-tokens 16 > ID.toml && seq 64 > TOKENS && head -c 8M /dev/urandom > BLOCKS";
const PUT: &str = "kvarts put BLOCKS --identity ID.toml --model llama-3.1-8b --tokens TOKENS";
/// A store with blocks, made by a server that has ended: it lies in ./kvarts-data.
const STORED: &str = "kvarts serve --budget 256M --segment 16M > served 2> log & while ! grep -qs serving served; do sleep 0.05; done; kvarts put BLOCKS --identity ID.toml --model llama-3.1-8b --tokens TOKENS && kvarts drain --yes && wait";

/// A store in two directories, made by a server that has ended.
const TWO_DISKS: &str = "kvarts serve --dir one,two --budget 256M --segment 16M --listen-grpc 127.0.0.1:0 --listen-metrics none --listen-socket two.sock > two.served 2> two.log & while ! grep -qs serving two.served; do sleep 0.05; done; kvarts drain --yes --server two.sock && wait";

/// With every run of the tests.
pub(super) const NOW: &[Scene] = &[
    Scene { name: "clients", steps: CLIENTS },
    Scene { name: "planning", steps: PLANNING },
    Scene { name: "offline tools", steps: OFFLINE },
    Scene { name: "bucket", steps: BUCKET },
    Scene { name: "servers", steps: SERVERS },
    Scene { name: "three nodes", steps: THREE_NODES },
];

const CLIENTS: &[Step] = &[
    serves("cargo run --release -- serve").with(SMALL),
    step("kvarts identity --model llama-3.1-8b > ID.toml", &[]),
    // What is to be filled in is filled in.
    lay(BLOCKS),
    step(PUT, &["4 blocks stored, 0 were stored before, 0 not stored"]),
    step(
        "kvarts match --identity ID.toml --model llama-3.1-8b --tokens TOKENS",
        &["4 of 4 blocks (64 tokens) can be restored"],
    ),
    step("kvarts match --plan --device h100 ...", &["4 of 4 blocks", "disk: "]).standing_for(
        "kvarts match --plan --device h100 --identity ID.toml --model llama-3.1-8b --tokens TOKENS",
    ),
    step(
        "kvarts get --to FILE --identity ID.toml --model llama-3.1-8b --tokens TOKENS",
        &["4 of 4 blocks, 8 MiB"],
    ),
    lay("cmp BLOCKS FILE"),
    step("kvarts ls", &["llama-3.1-8b demo, 32 layers, blocks of 16 tokens: 4 blocks, 8"]),
    step("kvarts stat", &["recovery", "0 problems at the last start"]),
    step("kvarts resume", &[]),
    step("kvarts pin | delete", &["4 of 4 blocks are pinned"])
        .standing_for("kvarts pin --identity ID.toml --model llama-3.1-8b --tokens TOKENS"),
    step("kvarts pin | delete", &["4"]).standing_for("kvarts pin --list"),
    step("kvarts session list", &["no sessions exist"]),
    step("kvarts pin | delete", &["4 "])
        .standing_for("kvarts delete --identity ID.toml --model llama-3.1-8b --tokens TOKENS --yes"),
    step("kvarts watch", &["EVENT"]).standing_for(
        "(while sleep 0.2; do kvarts put BLOCKS --identity ID.toml --model llama-3.1-8b --tokens TOKENS; kvarts delete --all --yes --identity ID.toml --model llama-3.1-8b; done) > /dev/null 2>&1 & kvarts watch --count 1; code=$?; kill $!; exit $code",
    ),
    step("kvarts scrub | compact | checkpoint | budget | reload | drain", &["no block is damaged"])
        .standing_for("kvarts scrub"),
    step("kvarts scrub | compact | checkpoint | budget | reload | drain", &[])
        .standing_for("kvarts compact"),
    step("kvarts scrub | compact | checkpoint | budget | reload | drain", &["a checkpoint was written"])
        .standing_for("kvarts checkpoint"),
    step("kvarts scrub | compact | checkpoint | budget | reload | drain", &["256 MiB"])
        .standing_for("kvarts budget"),
    step("kvarts scrub | compact | checkpoint | budget | reload | drain", &[]).standing_for("kvarts reload"),
    step("kvarts scrub | compact | checkpoint | budget | reload | drain", &[])
        .standing_for("kvarts drain --yes"),
    STOP,
];

const PLANNING: &[Step] = &[
    // The figures of README.md.
    step(
        "kvarts plan restore --model llama-3.1-70b --device h100 --devices 4 --disk 1.6",
        &["GROUP", "load from disk", "to the first token", "2236.2", "3052.7"],
    ),
    lay(
        "kvarts plan restore --model llama-3.1-70b --device h100 --devices 4 --disk 12 --overlap none | grep ' 1244\\.2'",
    ),
    lay(
        "kvarts plan restore --model llama-3.1-70b --device h100 --devices 4 --disk 1.6 --overlap none | grep 'boundary: token 0;'",
    ),
    step(
        "kvarts plan restore --model llama-3.1-70b --device h100 --devices 4 --stored 28672 --disk 12",
        &["GROUP", "load from disk", "boundary: token ", "with the shorter load of this plan", "729.0"],
    ),
    step(
        "kvarts plan restore --model llama-3.1-70b --device h100 --devices 4 --stored 28672 --disk 2.75 --overlap none",
        &["GROUP"],
    ),
    step("kvarts plan break-even", &["llama-3.1-8b", "deepseek-v3.2"]),
    step("kvarts plan break-even --tokens 32768", &["llama-3.1-8b"]),
    lay(
        "for n in 1 2 3 4 5 6 7 8; do echo \"{\\\"cached\\\": $((n * 512)), \\\"new\\\": $((n * 256)), \\\"ms\\\": $((n * 7))}\"; done > FILE",
    ),
    step("kvarts plan calibrate FILE", &["%"]),
    lay(
        r#"echo '{"prompt_tokens": 9000, "model": "qwen3-32b", "device": "h100", "owner": [1, 8000], "nodes": [{"node": 1, "decodes": true, "queue_ms": 5, "decoding": 3, "memory_tokens": 8000, "disk_tokens": 8000, "disk_bytes_per_ms": 12e6, "disk_queue_ms": 0, "network_bytes_per_ms": 5e7, "network_queue_ms": 0}]}' > FILE"#,
    ),
    step("kvarts plan route FILE --explain", &["node 1: "]),
    lay("head -n 40 $ROOT/simulator/tests/traces/mooncake-conversation-500.jsonl > TRACE"),
    step("kvarts sim disk TRACE", &["hit_rate"]).with("--capacity-blocks 256"),
    lay("ln -s $ROOT/docs docs && cp docs/guides/clusters/chat.toml FILE"),
    step("kvarts sim TRACE --cluster FILE", &["ttft_ms.p99", "hits.miss"]),
    lay("mkdir target && ln -s $ROOT/simulator/tests/recorded/times target/recordings"),
    step(
        "cd target/recordings && kvarts sim engine none.jsonl memory.jsonl kvarts.jsonl --calibrate calibrate.jsonl --calibrate calibrate-kvarts.jsonl",
        &["memory and disk"],
    ),
    lay("cp target/recordings/calibrate.jsonl REC"),
    step("kvarts sim engine REC --calibrate REC", &["none"]),
    lay("cp $ROOT/layout/testdata/configs/deepseek_v41.json config.json"),
    step("kvarts model import config.json --out my-model.toml", &[]),
    step(
        "kvarts model show my-model.toml --tokens 131072",
        &["1,650 B a token", "pairs: stored by 3 layers, read by 15 later layers"],
    ),
    step("cargo run --release --quiet -- model show deepseek-v4-pro --tokens 131072", MODEL),
    step("cargo run --release --quiet -- model show lama-3.1-8b", &["did you mean `llama-3.1-8b`?"]).ends(2),
];

/// Lines of the page.
const MODEL: &[&str] = &[
    "fingerprint      9de1597f9f88c8e2c0af0b4fcd333e4a5129187f51b093046eb6013189f6e9f9",
    "layers           61: 2 x hca, 29 x (csa, hca), csa",
    "boundary         6.69 MiB (7,017,472 B): window 4.35 MiB, csa_tail 1.88 MiB, index_tail 480 KiB",
    "131,072 tokens   688.93 MiB (722,395,136 B) in 512 blocks; with the state at one boundary: 695.62 MiB (729,412,608 B)",
];

const OFFLINE: &[Step] = &[
    lay(BLOCKS),
    lay(STORED),
    lay("mv kvarts-data DIR"),
    step(
        "kvarts init DIR",
        &["a store exists in DIR", "the id of the store, which is also the id of the node in a cluster: "],
    ),
    lay("kvarts init new --budget 256M | grep 'a store was created in new' && kvarts fsck new"),
    step("kvarts config show", &["listen.lame_duck", "cold.bucket", "no cold tier"]),
    step("kvarts fsck DIR", &["clean"]),
    step("kvarts inspect DIR", &["4 blocks in "]),
    step("kvarts ls DIR", &["llama-3.1-8b"]),
    step("kvarts export DIR --all --to FILE", &["4 blocks"]),
    step("kvarts import FILE --into DIR", &["4"]),
    step("kvarts compact DIR", &[]),
    lay(TWO_DISKS),
    lay("rm -r two"),
    step("kvarts replace DIR --dir DIRS", &["two is now part of the store"])
        .standing_for("kvarts replace two --dir one,two"),
];

const BUCKET: &[Step] = &[
    lay("mkdir srv"),
    lay(BLOCKS),
    Step {
        shown: "",
        run: Run::As("kvarts serve --budget 256M --segment 16M"),
        ends: Ends::Serving,
        says: &["serving "],
    },
    lay(PUT),
    step("mkdir -p /srv/kvarts-cold", &[]),
    step("kvarts cold push ./kvarts-data --live --all --bucket file:///srv/kvarts-cold", &["4 blocks"]),
    step("kvarts cold ls --bucket file:///srv/kvarts-cold", &["llama-3.1-8b"]),
    step(
        "kvarts cold restore --all --into ./new-data --create --bucket file:///srv/kvarts-cold",
        &["4 blocks"],
    )
    .with("--segment-mib 16"),
    step(
        "kvarts cold push ./kvarts-data --live --all --bucket file:///srv/kvarts-cold --json",
        &["\"blocks\""],
    ),
    step("kvarts cold gc --older 30d --most 96G --bucket file:///srv/kvarts-cold --json", &["{"]),
    step("kvarts cold fsck --quick --bucket file:///srv/kvarts-cold", &["clean"]),
];

const SERVERS: &[Step] = &[
    // A file of settings as on a machine where it is installed.
    lay("mkdir -p etc/kvarts run mnt/nvme mnt/nvme0 mnt/nvme1 nvme"),
    lay("printf '[store]\\nbudget = \"64 MiB\"\\nsegment = \"4 MiB\"\\n' > etc/kvarts/kvarts.toml"),
    step("kvarts config check --config /etc/kvarts/kvarts.toml", &["the configuration is valid: "]),
    step("kvarts config token", &["token (for the client", "hash (for [[tokens]]"]),
    step("mkdir -p /run/kvarts", &[]),
    serves("kvarts serve --dir /mnt/nvme/kvarts --listen-socket /run/kvarts/kvarts.sock")
        .with("--budget 64M --segment 4M"),
    STOP,
    // Of a node the file of members has to say its name, which the first start tells.
    lay("head -c 32 /dev/urandom > etc/kvarts/secret"),
    lay(
        "printf 'epoch = 1\\n[[node]]\\nid = \"00112233445566778899aabbccddeeff\"\\naddress = \"127.0.0.1:7499\"\\n' > members.toml",
    ),
    lay(
        "kvarts serve --dir nvme/kvarts --budget 64M --segment 4M --cluster members.toml --cluster-secret etc/kvarts/secret 2> refused; test $? = 2",
    ),
    lay(
        "id=$(grep -o '[0-9a-f]\\{32\\}' refused | grep -v 00112233445566778899aabbccddeeff | head -n 1); sed -i s/00112233445566778899aabbccddeeff/$id/ members.toml; echo $id > NODE; cat members.toml; grep $id members.toml",
    ),
    serves("kvarts serve --dir /nvme/kvarts --cluster members.toml --cluster-secret /etc/kvarts/secret")
        .with("--budget 64M --segment 4M --listen-socket kvarts.sock"),
    step("kvarts cluster status", &["epoch 1, 1 nodes"]).with("--server kvarts.sock"),
    STOP,
];

/// The guide as typed: servers in other terminals stay until the end.
const THREE_NODES: &[Step] = &[
    step("echo 'epoch = 1' > members.toml", &[]),
    step("kvarts init n1 --budget 1G --member 127.0.0.1:7401 >> members.toml", &[]),
    step("kvarts init n2 --budget 1G --member 127.0.0.1:7402 >> members.toml", &[]),
    step("kvarts init n3 --budget 1G --member 127.0.0.1:7403 >> members.toml", &[]),
    lay("kvarts init n3 | grep $(tail -n 2 members.toml | grep -o '[0-9a-f]\\{32\\}')"),
    serves(
        "kvarts serve --dir n1 --budget 1G --cluster members.toml --listen-grpc none --listen-metrics none",
    ),
    serves(
        "kvarts serve --dir n2 --budget 1G --cluster members.toml --listen-grpc none --listen-metrics none",
    ),
    serves(
        "kvarts serve --dir n3 --budget 1G --cluster members.toml --listen-grpc none --listen-metrics none",
    ),
    lay("until kvarts cluster status --server n2/kvarts.sock; do sleep 0.05; done"),
    lay("until kvarts cluster status --server n1/kvarts.sock; do sleep 0.05; done"),
    step("kvarts cluster status --server n1/kvarts.sock", &["epoch 1, 3 nodes", "127.0.0.1:7403"]),
    lay(BLOCKS),
    step(
        "kvarts put BLOCKS --identity ID.toml --model llama-3.1-8b --tokens TOKENS --server n1/kvarts.sock",
        &["4 blocks stored"],
    ),
    // The directory hears of them in a moment.
    lay(
        "until kvarts match --identity ID.toml --model llama-3.1-8b --tokens TOKENS --server n2/kvarts.sock | grep '^4 of 4 '; do sleep 0.05; done",
    ),
    step(
        "kvarts match --identity ID.toml --model llama-3.1-8b --tokens TOKENS --server n2/kvarts.sock",
        &["4 of 4 blocks", "127.0.0.1:7401"],
    ),
    step(
        "kvarts get --to BACK --identity ID.toml --model llama-3.1-8b --tokens TOKENS --server n2/kvarts.sock",
        &["4 of 4 blocks, 8 MiB"],
    ),
    lay("cmp BLOCKS BACK"),
    STOP,
];

/// At night: what takes longer.
pub(super) const NIGHTLY: &[Scene] = &[
    Scene { name: "benches", steps: BENCHES },
    Scene { name: "search", steps: SEARCH },
    Scene { name: "certificates", steps: CERTIFICATES },
    Scene { name: "with cargo", steps: CARGO },
];

/// With sizes that take a moment: figures of them mean nothing.
const BENCHES: &[Step] = &[
    step("kvarts bench layers", VERDICT).with("--mib 4 --record-mib 2 --pairs 3 --model deepseek-v4-flash"),
    step("kvarts bench put", VERDICT).with("--mib 16 --segment-mib 16 --groups 1 --pairs 3"),
    step("kvarts bench match", VERDICT).with("--blocks 4096 --keys 64 --lookups 4 --pairs 3"),
    step("kvarts bench mixed", VERDICT)
        .with("--mib 64 --reads 100 --phases 2 --block-tokens 1 --rate-ms 200"),
    step("kvarts bench scale", VERDICT).with("--blocks 100000,200000 --records 20000 --directories 2"),
    step("kvarts bench open", VERDICT).with("--blocks 4096 --segment-mib 1 --pairs 3"),
    step("kvarts bench churn", VERDICT)
        .with("--seconds 3 --budget-mib 16 --segment-mib 1 --block-kib 1 --samples 4"),
    step("kvarts bench serve", VERDICT).with("--mib 8 --small 20 --pairs 3"),
    step("kvarts bench cold", VERDICT).with(
        "--mib 8 --block-tokens 1 --own-block-tokens 1 --reads 20 --pairs 3 --latency-ms 2 --spill-mib 512",
    ),
    step("kvarts bench dual", VERDICT).with("--mib 16 --rate 64 --pairs 3 --announce 1000"),
    step("kvarts bench gpu", VERDICT)
        .with("--tokens 1024 --arena-mib 16 --pairs 3 --model deepseek-v4-flash"),
];

const VERDICT: &[&str] = &["FIGURE", "Verdict: "];

const SEARCH: &[Step] = &[
    lay("ln -s $ROOT/docs docs && head -n 200 $ROOT/simulator/tests/traces/mooncake-conversation-500.jsonl > TRACE"),
    step(
        "kvarts sim search TRACE --cluster docs/guides/clusters/chat.toml --ttft-ms 6000 --tpot-ms 50 --vary limits,router,nodes,disk",
        &["NODES", "COST/M"],
    )
    .with("--runs 20"),
];

/// As a shell runs the block of docs/CLUSTER.md, for the name of a store that is there.
const CERTIFICATES: &[Step] = &[
    lay(
        "printf 'epoch = 1\\n[[node]]\\nid = \"00112233445566778899aabbccddeeff\"\\naddress = \"127.0.0.1:7498\"\\n' > members.toml",
    ),
    lay("kvarts serve --budget 64M --segment 4M --cluster members.toml 2> refused; test $? = 2"),
    lay(
        "id=$(grep -o '[0-9a-f]\\{32\\}' refused | grep -v 00112233445566778899aabbccddeeff | head -n 1); sed -i s/00112233445566778899aabbccddeeff/$id/ members.toml; echo id=$id > NODE; grep $id members.toml",
    ),
    step(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj \"/CN=kvarts authority\" -keyout authority.key -out authority.pem",
        &[],
    ),
    step("id=00112233445566778899aabbccddeeff", &[]),
    step(
        "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj \"/CN=kvarts-$id\" -keyout node.key -out node.csr",
        &[],
    )
    .standing_for(
        ". ./NODE; openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj \"/CN=kvarts-$id\" -keyout node.key -out node.csr",
    ),
    step(
        "printf 'subjectAltName=DNS:kvarts-%s\\nextendedKeyUsage=serverAuth,clientAuth\\n' $id > node.ext",
        &[],
    )
    .standing_for(
        ". ./NODE; printf 'subjectAltName=DNS:kvarts-%s\\nextendedKeyUsage=serverAuth,clientAuth\\n' $id > node.ext",
    ),
    step(
        "openssl x509 -req -in node.csr -CA authority.pem -CAkey authority.key -days 365 -extfile node.ext -out node.pem",
        &[],
    ),
    serves(
        "kvarts serve --cluster members.toml --cluster-certificate node.pem --cluster-key node.key --cluster-authority authority.pem",
    )
    .with(SMALL),
    lay("kvarts cluster status"),
    STOP,
];

/// As they stand, from the repository, with builds of their own.
const CARGO: &[Step] = &[
    step("cargo run --release -- demo", &["The demonstration took "])
        .standing_for("cd $ROOT && exec cargo run --release --locked -- demo"),
    step("cargo install --path kvarts", &[])
        .standing_for("root=$PWD; cd $ROOT && cargo install --path kvarts --locked --root $root && $root/bin/kvarts --version"),
    step("cargo run --release -p kvarts-tests --bin campaign -- list", &["R1"])
        .standing_for("cd $ROOT && cargo run --release -p kvarts-tests --bin campaign -- list"),
    step("cargo build --release && cargo run --release -p kvarts-tests --bin campaign -- list", &["R1"])
        .standing_for(
            "cd $ROOT && cargo build --release && cargo run --release -p kvarts-tests --bin campaign -- list",
        ),
    step("cargo run --release -p kvarts-tests --bin campaign -- R1", &["R1"])
        .standing_for("cd $ROOT && cargo run --release -p kvarts-tests --bin campaign -- R1"),
];

/// Commands that other tests run as they stand on their pages, by the name of the test.
pub(super) const BY_OTHERS: &[(&str, &[&str])] = &[
    (
        "the_quick_start_ends_with_equal_bytes_as_it_stands_on_its_page",
        &[
            "kvarts serve --budget 2G",
            "kvarts identity --model llama-3.1-8b --revision demo --block-tokens 16 > ID.toml",
            "seq 64 > TOKENS",
            "head -c 8M /dev/urandom > BLOCKS",
            "kvarts get --to BACK --identity ID.toml --model llama-3.1-8b --tokens TOKENS",
            "cmp BLOCKS BACK && echo equal",
        ],
    ),
    (
        "a_disk_that_can_be_read_is_copied_and_nothing_is_lost",
        &[
            "tar -C /mnt/nvme1 --sparse --hole-detection=seek -cf - kvarts | tar -C /mnt/new -xf -",
            "kvarts fsck /mnt/nvme0/kvarts /mnt/new/kvarts",
        ],
    ),
    (
        "a_server_goes_on_without_a_dead_disk_and_an_empty_one_takes_its_place",
        &[
            "kvarts replace /mnt/nvme1/kvarts --dir /mnt/nvme0/kvarts,/mnt/nvme1/kvarts",
            "kvarts fsck /mnt/nvme0/kvarts /mnt/nvme1/kvarts",
        ],
    ),
];

/// What cannot be run in a test, and why.
pub(super) const NOT_HERE: &[(&str, &[&str])] = &[
    ("it is every test, this one among them", &["cargo test --workspace"]),
    (
        "hours or days; docs/RELIABILITY.md says when each was run",
        &[
            "cargo run --release -p kvarts-tests --bin campaign -- all --tier nightly",
            "cargo run --release -p kvarts-tests --bin campaign -- R1 --tier nightly --seed 100..200",
            "cargo run --release -p kvarts-tests --bin campaign -- all --tier release --resume FILE",
            "cargo build --release && cargo run --release -p kvarts-tests --bin campaign -- R1,R2,R5,R6,R7,R9,R12 --tier nightly --resume nightly.json --json",
        ],
    ),
    (
        "the merge tier, with which `.ci/run` ends, runs R27 whole in the build of the tests",
        &["cargo run --release -p kvarts-tests --features planted --bin campaign -- R27"],
    ),
    (
        "`scripts/wheel check` makes the module, installs it and tries it, its program among that",
        &[
            "scripts/wheel",
            "pip install dist/kvarts-*.whl",
            "python3 -m venv env && env/bin/pip install dist/kvarts-*.whl",
            "env/bin/kvarts serve --dir /mnt/nvme/kvarts --listen-socket /run/user/1000/kvarts.sock",
        ],
    ),
    (
        "`scripts/wheel check` has the module write that package, into a folder of the test's own",
        &["python -m kvarts.mooncake /opt/kvarts-as-mooncake"],
    ),
    (
        "a real engine and its packages: `scripts/engines` runs each with what these lines configure",
        &[
            "vllm serve MODEL --kv-transfer-config '{\"kv_connector\": \"Kvarts\", \"kv_connector_module_path\": \"kvarts.vllm\", \"kv_role\": \"kv_both\", \"kv_connector_extra_config\": {\"cpu_bytes_to_use\": 8000000000, \"server\": \"/run/kvarts/kvarts.sock\"}}'",
            "vllm serve MODEL --kv-transfer-config '{\"kv_connector\": \"KvartsLayers\", \"kv_connector_module_path\": \"kvarts.vllm_layers\", \"kv_role\": \"kv_both\", \"kv_connector_extra_config\": {\"pool_bytes\": 8000000000, \"server\": \"/run/kvarts/kvarts.sock\"}}'",
            "KVARTS_VLLM=/run/kvarts/kvarts.sock vllm serve MODEL",
            "kvarts doctor . --engine vllm --python /opt/vllm/bin/python",
            "python -m kvarts.probe vllm --place /opt/vllm/lib/python3.12/site-packages",
            "lmcache server ... --l2-adapter '{\"type\": \"native_plugin\", \"module_path\": \"kvarts.lmcache\", \"class_name\": \"Kvarts\", \"adapter_params\": {\"server\": \"/run/kvarts/kvarts.sock\", \"revision\": \"0e9e39f\", \"dtype\": \"bf16\"}}'",
            "python -m sglang.launch_server ... --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic --unified-cache-external-linker-config '{\"linker\": \"KvartsLinker\", \"linker_module_path\": \"kvarts.sglang_linker\", \"linker_extra_config\": {\"server\": \"/run/kvarts/kvarts.sock\", \"pool_bytes\": 8000000000}}'",
            "EXTRA='{\"backend_name\": \"kvarts\", \"module_path\": \"kvarts.sglang\", \"class_name\": \"Kvarts\", \"interface_v1\": 1, \"server\": \"/run/kvarts/kvarts.sock\"}'",
            "python -m sglang.launch_server ... --disaggregation-mode prefill --page-size 64 --hicache-mem-layout page_first --enable-hierarchical-cache --hicache-write-policy write_through --hicache-storage-backend dynamic --hicache-storage-backend-extra-config \"$EXTRA\"",
            "python -m sglang.launch_server ... --disaggregation-mode decode --page-size 64 --hicache-mem-layout page_first --disaggregation-decode-enable-offload-kvcache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config \"$EXTRA\"",
            "python -m sglang.launch_server ... --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{\"backend_name\": \"kvarts\", \"module_path\": \"kvarts.sglang\", \"class_name\": \"Kvarts\", \"interface_v1\": 1, \"server\": \"/run/kvarts/kvarts.sock\"}'",
            "scripts/sim-record calibrate calibrate-kvarts {none,memory,kvarts}{,-clock} --repeats 13",
        ],
    ),
    (
        "engines on other machines; `scripts/wheel check` runs the proxy before doubles of engines and real servers",
        &[
            "python -m kvarts.route --listen 0.0.0.0:8080 --engine http://10.0.0.1:8000,server=10.0.0.1:7440 --engine http://10.0.0.2:8000,server=10.0.0.2:7440",
        ],
    ),
    (
        "users, units and disks of a machine: `scripts/package trial` runs them as they stand, in a root of its own",
        &[
            "useradd --system --user-group --home-dir /var/lib/kvarts --no-create-home --shell /usr/sbin/nologin kvarts",
            "install -m 755 kvarts /usr/local/bin/kvarts",
            "install -D -m 644 kvarts.toml /etc/kvarts/kvarts.toml",
            "install -D -m 644 kvarts.service /etc/systemd/system/kvarts.service",
            "groupadd --force inference",
            "usermod -aG inference kvarts",
            "install -d -o kvarts -g kvarts -m 750 /mnt/nvme0/kvarts /mnt/nvme1/kvarts",
            "systemctl daemon-reload",
            "systemctl enable --now kvarts",
            "kvarts stat --server /run/kvarts/kvarts.sock",
        ],
    ),
    ("an installed service", &["systemctl restart kvarts"]),
    (
        "a cluster of Kubernetes; `scripts/kubernetes check` renders the chart, builds the recipes and tries both",
        &[
            "kubectl create namespace kvarts",
            "kubectl -n kvarts create secret generic kvarts-tokens --from-file=kvarts.toml",
            "kubectl -n kvarts exec POD -- sh -c 'kill -HUP 1'",
            "kubectl label node NODE kvarts/disks=yes",
            "helm install kvarts packaging/kubernetes/chart -n kvarts -f my-values.yaml",
            "kubectl apply -k packaging/kubernetes/recipes/vllm/base",
            "helm upgrade kvarts packaging/kubernetes/chart -n kvarts -f my-values.yaml",
        ],
    ),
    (
        "a release: `scripts/release` runs them on what it has signed, in a test of `tests/tests/releases.rs`",
        &[
            "ssh-keygen -Y verify -f allowed_signers -I release@kvarts -n kvarts-release -s SHA256SUMS.sig < SHA256SUMS",
            "sha256sum --check --strict SHA256SUMS",
        ],
    ),
    (
        "an etcd on other machines; the tests of `kvarts/tests/cluster_etcd.rs` register programs with one of their own",
        &[
            "kvarts serve --cluster etcd://10.0.0.9:2379/kvarts/production --cluster-address 10.0.0.1:7400 --cluster-secret /etc/kvarts/secret",
        ],
    ),
];
