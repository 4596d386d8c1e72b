//! What wins, what is refused, and in which words.

use super::*;

fn resolve(file: &str, environment: &[(&str, &str)], flags: Settings) -> Result<Config, Complaint> {
    let variable = |name: &str| {
        environment.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    };
    Config::resolve(Some((Path::new("kvarts.toml"), file)), variable, &flags)
}

fn text(value: &str) -> Option<String> {
    Some(value.to_owned())
}

fn complaint(file: &str) -> String {
    resolve(file, &[], Settings::default()).unwrap_err().to_string()
}

fn from<'a>(config: &'a Config, name: &str) -> &'a str {
    config.origins.iter().find(|setting| setting.name == name).unwrap().from
}

#[test]
fn without_any_configuration_a_server_is_its_own_hosts() {
    let config = Config::standard().unwrap();
    assert_eq!(config.directories, [PathBuf::from("./kvarts-data")]);
    assert!(config.grpc.unwrap().ip().is_loopback() && config.metrics.unwrap().ip().is_loopback());
    assert_eq!(config.socket, Some(PathBuf::from("./kvarts-data/kvarts.sock")));
    assert!(config.gate.is_open() && config.tls.is_none() && config.budget.is_none());
    assert!(config.origins.iter().all(|setting| setting.from == "default"));
}

#[test]
fn flags_win_over_the_environment_and_that_over_the_file() {
    let file = "[store]\nbudget = '1 TiB'\nexecutors = 3\ndirectories = ['/a', '/b']\n[limits]\nmemory = '128 MiB'\n";
    let flags = Settings { executors: text("5"), ..Settings::default() };
    let environment = [("KVARTS_STORE_EXECUTORS", "4"), ("KVARTS_LIMITS_MEMORY", "96 MiB")];
    let config = resolve(file, &environment, flags).unwrap();
    assert_eq!((config.executors, config.memory, config.budget), (5, 96 << 20, Some(1 << 40)));
    assert_eq!(config.directories, [PathBuf::from("/a"), PathBuf::from("/b")]);
    assert_eq!(from(&config, "store.executors"), "flag");
    assert_eq!(from(&config, "limits.memory"), "environment");
    assert_eq!(from(&config, "store.budget"), "file");
    assert_eq!(from(&config, "listen.grpc"), "default");
}

#[test]
fn every_setting_has_a_value_and_a_source_whatever_is_set() {
    let known = reference().lines().filter(|line| line.starts_with("| `")).count();
    for file in
        ["", "[cold]\nbucket = 'file:///b'\n[cluster]\nmembers = 'm.toml'\n[store]\nbudget = '1 TiB'\n"]
    {
        let config = resolve(file, &[], Settings::default()).unwrap();
        let names: std::collections::BTreeSet<_> =
            config.origins.iter().map(|setting| setting.name).collect();
        assert_eq!((names.len(), config.origins.len()), (known, known), "{file}: each once");
        assert!(config.origins.iter().all(|setting| !setting.value.is_empty()), "{:?}", config.origins);
        let set = config.origins.iter().filter(|setting| setting.from != "default").count();
        assert_eq!(set, file.matches('=').count(), "{file}");
    }
}

#[test]
fn a_budget_whose_unit_was_forgotten_is_refused_with_what_was_meant() {
    let such = "or a part of the disks such as 90%";
    let smaller =
        |shown: &str| format!("{shown} is smaller than the smallest store: write a size such as 64G, {such}");
    for (wrong, what) in [
        ("90", "90 means 90 B: write 90% for a part of the disks, or 90G".to_owned()),
        ("'90'", "90 means 90 B: write 90% for a part of the disks, or 90G".to_owned()),
        ("900", format!("900 means 900 B: write a unit, such as 900G, {such}")),
        ("'900 B'", smaller("900 B")),
        ("'900B'", smaller("900B")),
        ("'512K'", smaller("512K")),
        ("0", smaller("0")),
    ] {
        let told = complaint(&format!("[store]\nbudget = {wrong}\n"));
        assert!(told.ends_with(&format!("store.budget: {what}")), "{told}");
    }
    assert!(resolve("[store]\nbudget = 1048576\n", &[], Settings::default()).is_ok());
}

#[test]
fn a_server_with_little_memory_for_requests_has_little_for_its_bucket() {
    let of = |memory: &str, rest: &str| {
        let file =
            format!("[limits]\nmemory = '{memory}'\nindex = '64 MiB'\n[cold]\nbucket = 'file:///b'\n{rest}");
        let config = resolve(&file, &[], Settings::default()).unwrap();
        let parts = config.memory_parts();
        let bytes = |what: &str| parts.iter().find(|part| part.what == what).unwrap().bytes >> 20;
        (
            bytes("restores from the bucket"),
            bytes("manifests and indexes of the bucket"),
            bytes("index of blocks"),
        )
    };
    assert_eq!(of("64 MiB", ""), (128, 64 + 32, 64));
    assert_eq!(of("200 MiB", ""), (200, 100 + 50, 64));
    assert_eq!(of("8 GiB", ""), (256, 128 + 64, 64));
    assert_eq!(of("64 MiB", "memory = '1 GiB'\n"), (1024, 128 + 64, 64));
}

#[test]
fn executors_are_as_many_as_drives_want_and_an_engine_can_spare() {
    let of = super::check::executors_of;
    assert_eq!([1, 2, 4, 16].map(|cores| of(cores, 1)), [1, 2, 2, 2]);
    assert_eq!([(32, 4), (64, 4), (96, 4), (192, 4)].map(|(cores, drives)| of(cores, drives)), [4, 8, 8, 8]);
    assert_eq!([(96, 12), (128, 12), (256, 12)].map(|(cores, drives)| of(cores, drives)), [12, 16, 16]);
    assert_eq!(of(128, 0), 1, "what has no directory is refused elsewhere");
}

#[test]
fn what_is_no_setting_is_refused_by_name() {
    let meant = "kvarts.toml:3: the setting store.bugdet does not exist: did you mean store.budget?";
    assert!(complaint("# A file.\n[store]\nbugdet = '1 TiB'\n").contains(meant));
    let meant = "kvarts.toml:4: the setting stroe.budget does not exist: did you mean store.budget?";
    assert!(complaint("[store]\nbudget = '1 TiB'\n[stroe]\n 'budget' = '1 TiB'\n").contains(meant));
    assert!(
        complaint("[store]\nnonsense = 1\n")
            .ends_with("kvarts.toml:2: the setting store.nonsense does not exist")
    );
    assert!(complaint("\nbudget = 1\n").contains("kvarts.toml:2: the table budget does not exist"));
    assert!(complaint("[log]\nlevel = 'info'\n[store\n").starts_with("configuration: kvarts.toml:3: "));
    let told = complaint("[log]\nlevel = 'info'\n[[tenants]]\nname = 'a'\npinn = '1 GiB'\n");
    assert!(told.contains("kvarts.toml:5: tenants: unknown field `pinn`"), "{told}");
    assert!(
        complaint("[store]\n\nbudget = { most = 1 }\n").contains("kvarts.toml:3: store.budget is not a text")
    );
    assert!(complaint("[store]\nexecutors = 0\n").contains("1 to 256"));
    assert!(complaint("[store]\nbudget = '5 XB'\n").contains("is not a size"));
    assert!(complaint("[limits]\nmemory = '1 MiB'\n").contains("64 MiB"));
    assert!(complaint("[listen]\ngrpc = 'localhost'\n").contains("is not an address"));
    assert!(complaint("[device]\ncufile = 'gds'\n").contains("device.cufile: the mode"));
    assert!(complaint("[tls]\nkey = 'k.pem'\n").contains("set both the certificate and the key"));
    for wrong in ["nonsense", "info,nonsense", "kvarts_server=loud", "", "info,,debug"] {
        let told = complaint(&format!("[log]\nlevel = '{wrong}'\n"));
        assert!(told.contains("log.level") && told.contains("log level"), "{told}");
    }
    for good in ["off", "warn", "info,h2=warn", "kvarts_server=debug, audit=info"] {
        assert!(resolve(&format!("[log]\nlevel = '{good}'\n"), &[], Settings::default()).is_ok(), "{good}");
    }
}

#[test]
fn a_value_that_cannot_be_is_told_with_its_line_if_it_is_the_files() {
    let file = "[log]\nlevel = 'info'\nformat = 'xml'\n[store]\nbudget = '190%'\n";
    assert_eq!(
        complaint(&file.replace("190", "90")),
        "configuration: kvarts.toml:3: log.format: the value must be text or json, not xml"
    );
    let told = complaint(&file.replace("xml", "json"));
    assert!(
        told.starts_with("configuration: kvarts.toml:5: store.budget: \"190%\" is not a percentage"),
        "{told}"
    );
    let told =
        resolve(file, &[("KVARTS_LOG_FORMAT", "yaml"), ("KVARTS_STORE_BUDGET", "90%")], Settings::default());
    assert_eq!(
        told.unwrap_err().to_string(),
        "configuration: log.format: the value must be text or json, not yaml"
    );
    assert!(
        complaint("[listen]\nlame_duck = 31\n")
            .contains("kvarts.toml:2: listen.lame_duck: the value must be 0 to 30 seconds")
    );
}

const TENANT: &str = "[[tenants]]\nname = 'a'\npin = '1 GiB'\n";
const HASH: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

fn tokens(rights: &str) -> String {
    format!("{TENANT}[[tokens]]\ntenant = 'a'\nrights = [{rights}]\nhash = '{HASH}'\n")
}

#[test]
fn a_network_needs_tls_and_tokens_or_plain_words() {
    let open = "[listen]\ngrpc = '0.0.0.0:7440'\n";
    assert!(complaint(open).contains("no TLS and tokens"));
    let tls = "[tls]\ncertificate = 'c.pem'\nkey = 'k.pem'\n";
    assert!(complaint(&format!("{open}{tls}")).contains("no tokens"));
    assert!(complaint(&format!("{open}{}", tokens("'read'"))).contains("no TLS:"));
    assert!(resolve(&format!("{open}{tls}{}", tokens("'read'")), &[], Settings::default()).is_ok());
    let words = |words| Settings { open_network: text(words), ..Settings::default() };
    assert!(resolve(open, &[], words(OPEN_WORDS)).is_ok());
    assert!(resolve(open, &[], words("yes")).is_err());
    assert!(complaint("[listen]\ngrpc = '[::]:7440'\n").contains("no TLS and tokens"));
}

#[test]
fn tenants_and_tokens_belong_together() {
    assert!(complaint(TENANT).contains("without tokens"));
    assert!(complaint(&tokens("")).contains("read, write, pin, delete, admin"));
    assert!(complaint(&tokens("'root'")).contains("read, write, pin, delete, admin"));
    assert!(
        complaint(&tokens("'read'").replace("tenant = 'a'", "tenant = 'b'"))
            .contains("\"b\" of a token is not in [[tenants]]")
    );
    assert!(complaint(&tokens("'read'").replace(HASH, "12")).contains("64 hexadecimal digits"));
    let twice = format!("{TENANT}{TENANT}");
    assert!(complaint(&twice).contains("its own name"));
    let one_salt = "[[tenants]]\nname = 'a'\nsalt = 's'\n[[tenants]]\nname = 'b'\nsalt = 's'\n";
    assert!(complaint(one_salt).contains("would share data"));
    let unsalted = "[[tenants]]\nname = 'a'\nunsalted = true\n";
    let two = format!("{unsalted}{}", unsalted.replace("'a'", "'b'"));
    assert!(complaint(&two).contains("would share data"), "{}", complaint(&two));
    assert!(complaint(&format!("{unsalted}salt = 's'\n")).contains("has both a salt and `unsalted`"));
    let one = tokens("'read'").replace("pin = '1 GiB'", "unsalted = true");
    let config = resolve(&one, &[], Settings::default()).unwrap();
    let Gate::Tokens(of_unsalted) = &config.gate else { panic!("tokens") };
    assert!(of_unsalted[0].tenant.salt == Tenant::only().salt, "the data of a server without tokens");
    assert_eq!(of_unsalted[0].tenant.limits.pin_bytes, None);
    let config = resolve(&tokens("'read', 'write', 'pin'"), &[], Settings::default()).unwrap();
    let Gate::Tokens(tokens) = &config.gate else { panic!("tokens") };
    let (limits, rights) = (&tokens[0].tenant.limits, tokens[0].rights);
    assert_eq!(
        (limits.pin_bytes, rights.pin, rights.delete, rights.admin),
        (Some(1 << 30), true, false, false)
    );
}

#[test]
fn the_eviction_policy_is_chosen_by_name() {
    assert_eq!(Config::standard().unwrap().policy, EvictionPolicy::Weighted);
    let config = resolve("[store]\npolicy = 'lru'\n", &[], Settings::default()).unwrap();
    assert_eq!((config.policy, from(&config, "store.policy")), (EvictionPolicy::Lru, "file"));
    assert_eq!(config.endurance, None);
    let config = resolve("[store]\nendurance = '2 TiB'\n", &[], Settings::default()).unwrap();
    assert_eq!(config.endurance, Some(2 << 40));
    assert!(complaint("[store]\nendurance = 'much'\n").contains("store.endurance"));
    assert!(complaint("[store]\npolicy = 'fifo'\n").contains("weighted or lru"));
}

#[test]
fn a_socket_whose_path_is_too_long_is_refused_and_never_put_where_anybody_can() {
    let deep = format!("/{}", "deep/".repeat(30));
    for file in [format!("[listen]\nsocket = '{deep}sock'\n"), format!("[store]\ndirectories = ['{deep}']\n")]
    {
        let told = complaint(&file);
        assert!(told.contains("listen.socket") && told.contains("at most 107 bytes"), "{told}");
        assert!(told.contains(&deep) && told.contains("shorter"), "{told}");
    }
    let file = format!("[store]\ndirectories = ['{deep}']\n[listen]\nsocket = 'none'\n");
    assert_eq!(resolve(&file, &[], Settings::default()).unwrap().socket, None);
}

#[test]
fn metrics_on_a_network_need_plain_words() {
    let open = "[listen]\nmetrics = '0.0.0.0:7441'\n";
    let told = complaint(open);
    assert!(told.contains("listen.metrics") && told.contains("neither TLS nor tokens"), "{told}");
    // Words about another thing do not do.
    let words = Settings { open_network: text(OPEN_WORDS), ..Settings::default() };
    assert!(resolve(open, &[], words).is_err());
    let words = |words| Settings { open_metrics: text(words), ..Settings::default() };
    assert!(resolve(open, &[], words(OPEN_METRICS_WORDS)).is_ok());
    assert!(resolve(open, &[], words("yes")).is_err());
    assert!(resolve("", &[], words("yes")).is_err());
}

/// A Service `kvarts-store` with a port `grpc` gives these to each pod of its namespace that has service links.
#[test]
fn variables_of_services_are_no_settings_and_what_only_looks_like_one_is_refused() {
    let refused = |names: &[&str]| {
        let names = names.iter().map(|name| (*name).to_owned());
        Settings::refuse_unknown(names).err().map(|complaint| complaint.to_string())
    };
    let service = [
        "KVARTS_STORE_SERVICE_HOST",
        "KVARTS_STORE_SERVICE_PORT",
        "KVARTS_STORE_SERVICE_PORT_GRPC",
        "KVARTS_STORE_PORT",
        "KVARTS_STORE_PORT_7440_TCP",
        "KVARTS_STORE_PORT_7440_TCP_PROTO",
        "KVARTS_STORE_PORT_7440_TCP_PORT",
        "KVARTS_STORE_PORT_7440_TCP_ADDR",
    ];
    assert_eq!(refused(&service), None);
    // Beside a Service a slip is one all the same.
    for slip in ["KVARTS_STORE_BUDGT", "KVARTS_STORE_PORTS", "KVARTS_CLUSTER_LANES_PORT"] {
        let said = refused(&[&service[..], &[slip]].concat()).expect(slip);
        assert!(said.contains(&format!("{slip}: unknown setting")), "{said}");
    }
    // Without its host nothing says that there is a Service.
    for alone in &service[1..] {
        assert!(refused(&[alone]).is_some(), "{alone}");
    }
}

#[test]
fn a_misspelt_variable_is_refused_and_those_of_others_are_not() {
    let refused =
        |name: &str| Settings::refuse_unknown([name.to_owned()]).err().map(|complaint| complaint.to_string());
    let said = refused("KVARTS_STORE_BUDGT").unwrap();
    assert!(
        said.contains("KVARTS_STORE_BUDGT: unknown setting") && said.contains("KVARTS_STORE_BUDGET,"),
        "{said}"
    );
    for name in
        ["KVARTS_STORE_BUDGET", "KVARTS_SERVER", "KVARTS_SERVER_UID", "KVARTS_CONFIG", "KVARTS_ETCD", "PATH"]
    {
        assert_eq!(refused(name), None, "{name}");
    }
}
