//! The status page: what a server answers, and what a browser without a window makes of it. Where there is no Chromium
//! (`scripts/chromium` brings it) the tests with it say so and pass.

use crate::browser::Browser;
use crate::scratch::Scratch;
use crate::served::{Server, http};
use kvarts_client::{Client, ConnectOptions};
use kvarts_contract::api::{KvStore, Order, Placed, ReadRequest};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::Geometry;
use kvarts_layout::identity::IdentityForm;
use kvarts_layout::key::text_keys;
use serde_json::{Value, json};

/// A name of a model that would be an element, and run a script, if it were ever taken for markup.
const MODEL: &str = "<img src=x onerror=alert(1)> & \"pages\"";

/// Reads the ten blocks layer by layer, as an engine on this host does.
fn read_layers(server: &Server) {
    let options = ConnectOptions::to(format!("unix:{}", server.path("kvarts-data/kvarts.sock").display()));
    let client = Client::connect(&options).unwrap();
    let geometry = Geometry::opaque(4096).unwrap();
    let text = std::fs::read_to_string(server.path("ID.toml")).unwrap();
    let identity = IdentityForm::from_toml(&text).unwrap().of(&geometry).unwrap();
    let group = geometry.groups()[0].group;
    let coordinate = geometry.coordinate(group, 1, 0).unwrap();
    let shape = geometry.shape(group, coordinate, 16).unwrap();
    let namespace = client.register(&identity, &geometry).unwrap();
    let keys = text_keys(&(0..160).collect::<Vec<u32>>(), 16);
    let pool = SharedBuf::new(&client.pool(10 * 4096).unwrap(), 0, 10 * 4096).unwrap();
    let into = Placed::blocks(&shape, pool, 10).unwrap();
    let request =
        ReadRequest { order: Order::Layers, ..ReadRequest::new(namespace, group, coordinate, keys, into) };
    assert_eq!(block_on(client.get_into(request)).unwrap().usable_blocks, 10);
}

/// A server with blocks of [`MODEL`] that was asked for them.
fn used(name: &str) -> Server {
    let server = Server::start(Scratch::new(name), &["--index-memory", "64M"]);
    server.store_pages_of(MODEL);
    assert_eq!(server.client(&["match"], &["--tokens", "tokens"]).0, 0);
    assert_eq!(server.client(&["get", "--to", "back"], &["--tokens", "tokens"]).0, 0);
    server
}

#[test]
fn the_page_and_its_parts_are_answered_with_a_policy_and_nothing_else_is() {
    let server = Server::start(Scratch::new("page-http"), &["--index-memory", "64M"]);
    let get = |path: &str| http(server.metrics_address(), &format!("GET {path}"));
    for (path, kind) in [
        ("/", "html"),
        ("/page.css", "css"),
        ("/page.js", "javascript"),
        ("/figures.js", "javascript"),
        ("/inside.js", "javascript"),
    ] {
        let answer = get(path);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{path}: {head}");
        for line in [
            format!("content-type: text/{kind}; charset=utf-8"),
            format!("content-length: {}", body.len()),
            "x-content-type-options: nosniff".to_owned(),
            "cache-control: no-store".to_owned(),
        ] {
            assert!(head.lines().any(|told| told == line), "{path}: {line} is not in\n{head}");
        }
        let policy = head.lines().find(|line| line.starts_with("content-security-policy: ")).unwrap();
        for part in
            ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "form-action 'none'"]
        {
            assert!(policy.contains(part), "{path}: {policy}");
        }
        assert!(!head.to_lowercase().contains("access-control-"), "other sites may not read it: {head}");
    }
    assert!(get("/?x=1").starts_with("HTTP/1.1 200 OK\r\n"));
    for path in ["/index.html", "//", "/../page.css", "/page/page.css", "page.css", "/page.js%00"] {
        assert!(get(path).starts_with("HTTP/1.1 404 "), "{path}");
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        assert!(
            http(server.metrics_address(), &format!("{method} /")).starts_with("HTTP/1.1 405 "),
            "{method}"
        );
    }
}

#[test]
fn the_page_shows_what_the_server_does_while_it_does_it() {
    let mut server = used("page-shown");
    let Some(mut browser) = Browser::start(&server.path("profile")) else { return };
    let origin = format!("http://{}/", server.metrics_address());
    browser.open(&origin);
    browser.until("Number(document.body.dataset.looks) >= 1");
    assert_eq!(browser.run("document.getElementById('state').textContent"), "Well");
    assert_eq!(browser.run("document.getElementById('version').textContent"), env!("CARGO_PKG_VERSION"));
    // Which server this is: of two pages in two tabs each says its own.
    let store = server.metrics().lines().find_map(|line| {
        Some(line.strip_prefix("kvarts_store_info{store=\"")?.strip_suffix("\"} 1")?.to_owned())
    });
    let store = store.unwrap();
    let which = browser.run("document.getElementById('which').textContent");
    let begin = format!("store {store}, from {}, running for ", server.metrics_address());
    assert!(which.as_str().unwrap().starts_with(&begin), "{which}");
    assert!(server.kvarts(&["stat"]).1.starts_with(&format!("store {store}, ")));
    let title = browser.run("document.title");
    assert_eq!(title, format!("Kvarts {} {}", server.metrics_address(), &store[..8]));
    // The first look is since the start: all that was asked for was here.
    browser.until("document.querySelector('#models-table tbody th') !== null");
    assert_eq!(browser.run("document.querySelector('#models-table tbody th').textContent"), MODEL);
    assert_eq!(browser.run("document.images.length"), 0, "a name is text");
    // From now on half of what is asked for is not here, and the page hears of it by itself.
    let half = "[...document.querySelectorAll('figcaption')].some((one) => one.textContent.includes('50.0% at most'))";
    assert_eq!(browser.run(half), false);
    browser.until("Number(document.body.dataset.looks) >= 2");
    assert_eq!(server.client(&["match"], &["--tokens", "more"]).0, 1);
    browser.until(half);
    let more = "Number(document.body.dataset.looks) >= 4";
    browser.until(more);
    assert_eq!(browser.run("document.querySelector('figure path').getAttribute('d').startsWith('M')"), true);
    let loaded = "performance.getEntriesByType('resource').map((one) => one.name)";
    let loaded = browser.run(loaded);
    assert!(loaded.as_array().unwrap().len() >= 4, "{loaded}");
    assert!(
        loaded.as_array().unwrap().iter().all(|name| name.as_str().unwrap().starts_with(&origin)),
        "{loaded}"
    );
    // While there are calls they have a table; what it shows stays while the page is paused.
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| {
            for _ in 0..10 {
                assert_eq!(server.client(&["get", "--force", "--to", "back"], &["--tokens", "tokens"]).0, 0);
                std::thread::sleep(std::time::Duration::from_millis(200));
            }
        });
        let rows =
            "[...document.querySelectorAll('#calls-table tbody th')].map((one) => one.textContent).join()";
        browser.until(&format!(
            "!document.getElementById('calls-table').parentElement.hidden && {rows}.includes('get')"
        ));
        browser.run("document.getElementById('pause').click()");
        busy.join().unwrap();
    });
    assert_eq!(browser.complaints(), Vec::<String>::new());
    look_at(&mut browser);
    browser.run("document.getElementById('pause').click()");
    // What the policy is for: a script that got into the page is not run.
    let foreign = "new Promise((told) => {
        document.addEventListener('securitypolicyviolation', (event) => told(event.effectiveDirective));
        const script = document.createElement('script');
        script.textContent = 'window.foreign = 1';
        document.body.append(script);
    })";
    assert_eq!(browser.run(foreign), "script-src-elem");
    assert_eq!(browser.run("window.foreign === undefined"), true);
    server.end();
    browser.until("document.getElementById('state').textContent.startsWith('The server does not respond')");
    assert_eq!(browser.run("document.getElementById('state').classList.contains('bad')"), true);
}

/// What the page looks like, light and dark, wide and narrow; pictures of it are left in the build's directory.
fn look_at(browser: &mut Browser) {
    let mut grounds = Vec::new();
    for scheme in ["light", "dark"] {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        browser.ask("Emulation.setEmulatedMedia", json!({"features": features}));
        grounds.push(browser.run("getComputedStyle(document.body).backgroundColor"));
        // The ratio of luminance that text needs to be read: 4.5.
        let contrasts = "(() => {
            const style = getComputedStyle(document.documentElement);
            const light = (name) => {
                const parts = style.getPropertyValue(name).trim().slice(1).match(/../g).map((two) => parseInt(two, 16) / 255);
                const [r, g, b] = parts.map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
            };
            const ground = light('--ground');
            return ['--text', '--quiet', '--accent', '--bad', '--good'].map((name) => {
                const one = light(name);
                return Math.max(one, ground) / Math.min(one, ground);
            });
        })()";
        let contrasts = browser.run(contrasts);
        assert!(
            contrasts.as_array().unwrap().iter().all(|one| one.as_f64().unwrap() >= 4.5),
            "{scheme}: {contrasts}"
        );
        for (width, height) in [(1200, 900), (360, 800)] {
            let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
            browser.ask("Emulation.setDeviceMetricsOverride", size);
            browser.ask("Emulation.setScrollbarsHidden", json!({"hidden": true}));
            let wide = browser.run("document.documentElement.scrollWidth").as_u64().unwrap();
            assert!(wide <= width, "{wide} wide where {width} are to be had");
            let picture = browser.picture();
            assert!(picture.starts_with(b"\x89PNG\r\n") && picture.len() > 8 << 10, "{}", picture.len());
            let name = format!("status-page-{scheme}-{width}.png");
            std::fs::write(std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name), picture).unwrap();
        }
    }
    assert_ne!(grounds[0], grounds[1]);
}

#[test]
fn the_page_is_used_by_keys_and_told_by_a_screen_reader() {
    let server = used("page-keys");
    let Some(mut browser) = Browser::start(&server.path("profile")) else { return };
    browser.open(&format!("http://{}/", server.metrics_address()));
    browser.until("Number(document.body.dataset.looks) >= 2");
    let mut reached = Vec::new();
    for _ in 0..5 {
        browser.press("Tab", 9, "");
        let now = "document.activeElement.id || document.activeElement.textContent";
        reached.push(browser.run(now).as_str().unwrap().to_owned());
        let is_seen = browser.run("getComputedStyle(document.activeElement).outlineStyle");
        assert_eq!(is_seen, "solid", "{reached:?}");
    }
    assert_eq!(reached[..4], ["Skip to the figures", "pause", "interval", "Metrics"], "{reached:?}");
    browser.run("document.getElementById('pause').focus()");
    browser.press(" ", 32, " ");
    assert_eq!(browser.run("document.getElementById('pause').getAttribute('aria-pressed')"), "true");
    // A look that was under way may end; then there is none.
    let looks = "new Promise((told) => setTimeout(() => told(document.body.dataset.looks), 3000))";
    assert_eq!(browser.run(looks), browser.run(looks));
    browser.press(" ", 32, " ");
    let paused = browser.run("document.body.dataset.looks");
    browser.until(&format!("document.body.dataset.looks !== {paused}"));
    let tree = browser.ask("Accessibility.getFullAXTree", json!({}));
    let mut named = 0;
    for node in tree["nodes"].as_array().unwrap().iter().filter(|node| node["ignored"] == false) {
        let role = node["role"]["value"].as_str().unwrap_or_default();
        if ["button", "link", "combobox", "table", "heading", "columnheader", "rowheader"].contains(&role) {
            let name = node["name"]["value"].as_str().unwrap_or_default();
            assert!(!name.is_empty(), "a {role} without a name: {node}");
            named += 1;
        }
    }
    assert!(named > 10, "{named}");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// The segments, the last hour, a tree of prefixes, and when the layers of its last read came.
#[test]
fn the_page_shows_segments_the_past_hour_prefixes_and_when_layers_came() {
    let server = used("page-inside");
    // A second chain that forks from the first, as a session that goes on in another way.
    let fork = (0..5 * 16).chain(1000..1000 + 3 * 16).map(|token| format!("{token} ")).collect::<String>();
    std::fs::write(server.path("fork"), fork).unwrap();
    std::fs::write(server.path("eight"), vec![9; 8 * 4096]).unwrap();
    assert_eq!(server.client(&["put", "eight"], &["--tokens", "fork"]).0, 0);
    read_layers(&server);
    let Some(mut browser) = Browser::start(&server.path("profile")) else { return };
    browser.open(&format!("http://{}/", server.metrics_address()));
    browser.until("document.querySelectorAll('#segments rect.live').length > 0");
    let label = browser.run("document.querySelector('#segments svg').getAttribute('aria-label')");
    assert!(
        label.as_str().unwrap().starts_with("Shard 0: ") && label.as_str().unwrap().contains(" live, "),
        "{label}"
    );
    // Live bytes are drawn: some cell is neither empty nor fuller than a cell can be.
    let heights = "Math.max(...[...document.querySelectorAll('#segments rect.live')].map((one) => Number(one.getAttribute('height'))))";
    let highest = browser.run(heights).as_f64().unwrap();
    assert!(highest > 0.0 && highest <= 10.0, "{highest}");
    // The server has taken at least two samples when ten seconds are over; what was then is plotted to one who comes now.
    let history = "fetch('/history').then((answer) => answer.json()).then((told) => told.samples.length)";
    let begun = std::time::Instant::now();
    while browser.run(history).as_u64().unwrap() < 3 {
        assert!(begun.elapsed().as_secs() < 60);
        std::thread::sleep(std::time::Duration::from_millis(500));
    }
    browser.open(&format!("http://{}/?again", server.metrics_address()));
    browser.until("Number(document.body.dataset.looks) >= 2");
    let live = "[...document.querySelectorAll('figcaption')].find((one) => one.textContent.startsWith('Live bytes')).textContent";
    let live = browser.run(live);
    assert!(live.as_str().unwrap().contains("KiB now"), "{live}");
    let points = browser.run("document.querySelector('#plots path').parentElement.parentElement.parentElement.lastElementChild.querySelector('path').getAttribute('d').split(/[ML]/).length - 1");
    assert!(points.as_u64().unwrap() >= 3, "what was before the page is on its plots: {points}");

    browser.run("document.getElementById('inside').requestSubmit()");
    browser.until("document.querySelectorAll('#prefixes-table tbody tr').length === 3");
    let rows = "[...document.querySelectorAll('#prefixes-table tbody tr')].map((row) => [...row.cells].slice(0, 4).map((cell) => cell.textContent.trim().slice(0, 16)).slice(1).join(' '))";
    let rows = browser.run(rows);
    let mut said: Vec<&str> = rows.as_array().unwrap().iter().map(|row| row.as_str().unwrap()).collect();
    assert_eq!(said.remove(0), "5 80 2", "the trunk");
    said.sort_unstable();
    assert_eq!(said, ["3 48 none", "5 80 none"], "its branches");
    let model = browser.run("document.querySelector('#model option').textContent");
    assert!(model.as_str().unwrap().starts_with(MODEL), "{model}");
    assert_eq!(browser.run("document.images.length"), 0, "a name is text");
    // The trunk was read by layers: its row has a button, which shows when each layer had come.
    browser.run("document.querySelector('#prefixes-table tbody button').click()");
    assert_eq!(browser.run("document.getElementById('timeline').hidden"), false);
    assert_eq!(browser.run("document.querySelectorAll('#layers li').length"), 1);
    let title = browser.run("document.getElementById('timeline-title').textContent");
    assert!(
        title.as_str().unwrap().contains("local, ") && title.as_str().unwrap().contains("10 blocks"),
        "{title}"
    );
    assert_eq!(browser.run("document.querySelector('#layers progress').value"), 1);
    assert_eq!(browser.complaints(), Vec::<String>::new());
    let size = json!({"width": 1200, "height": 2200, "deviceScaleFactor": 1, "mobile": false});
    browser.ask("Emulation.setDeviceMetricsOverride", size);
    let picture = browser.picture();
    std::fs::write(std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("status-page-inside.png"), picture)
        .unwrap();
}

/// What the page reckons, from two samples that are written down.
#[test]
fn the_page_reckons_as_top_does() {
    let server = Server::start(Scratch::new("page-figures"), &["--index-memory", "64M"]);
    let Some(mut browser) = Browser::start(&server.path("profile")) else { return };
    browser.open(&format!("http://{}/", server.metrics_address()));
    browser.until("Number(document.body.dataset.looks) >= 1");
    let at = |n: u32| {
        let call = "path=\"grpc\",method=\"get\",class=\"foreground\"";
        let all = 10 * n;
        format!(
            "kvarts_time_seconds {n}\nkvarts_read_only{{reason=\"a \\\"disk\\\"\\\\\\nis gone\"}} 1\n\
             kvarts_lookup_blocks_total{{tenant=\"a\",model=\"m\",found=\"here\"}} {}\n\
             kvarts_lookup_blocks_total{{tenant=\"a\",model=\"m\",found=\"never_stored\"}} {n}\n\
             kvarts_blocks_missed_total{{tenant=\"a\",model=\"m\",reason=\"REASON_DIGEST\"}} {}\n\
             kvarts_call_seconds_bucket{{{call},le=\"0.001\"}} {}\n\
             kvarts_call_seconds_bucket{{{call},le=\"0.01\"}} {all}\n\
             kvarts_call_seconds_bucket{{{call},le=\"+Inf\"}} {all}\n\
             kvarts_call_seconds_count{{{call}}} {all}\n\
             kvarts_call_bytes_total{{{call},tenant=\"a\",direction=\"out\"}} {}\n\
             kvarts_device_failed_total{{executor=\"0\"}} {n}\nthis is no metric\n",
            9 * n,
            4 * n,
            6 * n,
            1000 * n,
        )
    };
    let mut figures = |before: Option<u32>, now: u32| -> Value {
        let text = |n: u32| format!("all.parse({})", Value::from(at(n)));
        let before = before.map_or("null".to_owned(), text);
        browser.run(&format!("import('/figures.js').then((all) => all.figures({before}, {}))", text(now)))
    };
    let seen = figures(Some(10), 14);
    assert_eq!(seen["seconds"], 4);
    assert_eq!(seen["hits"], json!({"asked": 40, "found": 36, "rate": 0.9}));
    assert_eq!(seen["misses"], json!([["REASON_DIGEST", 16], ["never_stored", 4]]));
    assert_eq!(seen["readOnly"], "a \"disk\"\\\nis gone");
    let call = &seen["calls"][0];
    assert_eq!(
        (&call["name"], &call["calls"], &call["out"]),
        (&json!("grpc get foreground"), &json!(10), &json!(1000))
    );
    assert_eq!((&call["p50"], &call["p99"]), (&json!(0.001), &json!(0.01)));
    assert_eq!(seen["models"][0]["hits"]["rate"], 0.9);
    assert_eq!(seen["events"], json!([{"what": "operations of the disks failed", "count": 4}]));
    // Counters that fell were begun anew: what they are is what they grew.
    let seen = figures(Some(100), 2);
    assert_eq!((&seen["hits"]["asked"], &seen["calls"][0]["calls"]), (&json!(20), &json!(0)));
    let seen = figures(None, 10);
    assert_eq!((&seen["hits"]["asked"], &seen["calls"][0]["out"]), (&json!(100), &json!(0)));
    let shown = "import('/figures.js').then((all) => [all.size(0), all.size(1536), all.size(64 * 2 ** 20), all.percent(null),
                 all.percent(0.5), all.time(null), all.time(0.000064), all.time(0.25), all.time(Infinity), all.count(12345)])";
    let expected = json!([
        "0 B", "1.50 KiB", "64.0 MiB", "none", "50.0%", "none", "64 us", "250.0 ms", "long", "12,345"
    ]);
    assert_eq!(browser.run(shown), expected);
    let said = "import('/figures.js').then((all) => [all.span(5), all.span(119), all.span(120), all.span(7200), all.span(400000),
                 all.model('unregistered').startsWith('unregistered: look-ups of'), all.model('constructor')])";
    let expected = json!(["5 s", "119 s", "2 min", "2 h", "4 days", true, "constructor"]);
    assert_eq!(browser.run(said), expected);
    assert_eq!((&seen["store"], &seen["uptime"]), (&json!(""), &Value::Null));
}
