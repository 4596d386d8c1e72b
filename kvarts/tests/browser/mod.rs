//! Chromium without a window, driven over a pair of pipes by its own protocol: messages of JSON, each with a zero byte behind it.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long anything may take before the test fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A browser with one page; ended with the value.
pub(crate) struct Browser {
    child: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    sent: u64,
    /// Of the page, once there is one.
    session: Option<String>,
    /// What the page's console was told as errors, uncaught exceptions included.
    complaints: Vec<String>,
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Asked first, as its other processes end with it then.
        let _ = self.to.write_all(b"{\"id\":0,\"method\":\"Browser.close\"}\0");
        let end = Instant::now() + Duration::from_secs(5);
        while Instant::now() < end && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Browser {
    /// A browser, if there is Chromium here; there must be where `KVARTS_CHROMIUM=required`.
    pub(crate) fn start(profile: &Path) -> Option<Self> {
        let is_here = Command::new("sh").args(["-c", "command -v chromium"]).stdout(Stdio::null()).status();
        if !is_here.unwrap().success() {
            assert_ne!(std::env::var("KVARTS_CHROMIUM").as_deref(), Ok("required"), "run scripts/chromium");
            eprintln!("not tried: there is no chromium (scripts/chromium brings it)");
            return None;
        }
        // It takes commands from descriptor 3 and answers on 4. Its sandbox needs rights that containers do not give; the page is
        // our own.
        let command = "exec chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
                       --remote-debugging-pipe --user-data-dir=\"$0\" 3<&0 4>&1 </dev/null >/dev/null 2>/dev/null";
        let mut child = Command::new("sh")
            .args(["-c", command])
            .arg(profile)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (said, from) = channel();
        std::thread::spawn(move || {
            let mut out = BufReader::new(out);
            let mut message = Vec::new();
            while out.read_until(0, &mut message).is_ok_and(|read| read > 0) {
                message.pop();
                if said.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    return;
                }
                message.clear();
            }
        });
        let mut browser = Self { child, to, from, sent: 0, session: None, complaints: Vec::new() };
        let target = browser.ask("Target.createTarget", json!({"url": "about:blank"}));
        let attached = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.ask("Target.attachToTarget", attached)["sessionId"].clone();
        browser.session = Some(session.as_str().unwrap().to_owned());
        for domain in ["Runtime", "Log", "Page", "Accessibility"] {
            browser.ask(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    /// The answer to a command of the protocol.
    pub(crate) fn ask(&mut self, method: &str, params: Value) -> Value {
        self.sent += 1;
        let mut message = json!({"id": self.sent, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.to.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let mut said = self.from.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{method}: no answer"));
            if said["id"] == self.sent {
                assert!(said["error"].is_null(), "{method}: {said}");
                return said["result"].take();
            }
            self.hear(&said);
        }
    }

    fn hear(&mut self, said: &Value) {
        let is_complaint =
            match said["method"].as_str().unwrap_or_default() {
                "Runtime.exceptionThrown" => true,
                "Runtime.consoleAPICalled" => ["error", "warning", "assert"]
                    .contains(&said["params"]["type"].as_str().unwrap_or_default()),
                "Log.entryAdded" => ["error", "warning"]
                    .contains(&said["params"]["entry"]["level"].as_str().unwrap_or_default()),
                _ => false,
            };
        if is_complaint {
            self.complaints.push(said["params"].to_string());
        }
    }

    /// What the console was told as errors and warnings until now.
    pub(crate) fn complaints(&mut self) -> Vec<String> {
        // What was said before this answer has been heard after it.
        self.run("0");
        std::mem::take(&mut self.complaints)
    }

    pub(crate) fn open(&mut self, address: &str) {
        let said = self.ask("Page.navigate", json!({"url": address}));
        assert!(said["errorText"].is_null(), "{said}");
        self.until(&format!("location.href === '{address}' && document.readyState === 'complete'"));
    }

    /// The value of an expression in the page; of a promise, once it has one.
    pub(crate) fn run(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let mut said = self.ask("Runtime.evaluate", params);
        assert!(said["exceptionDetails"].is_null(), "{expression}: {said}");
        said["result"]["value"].take()
    }

    /// Waits until an expression is true.
    pub(crate) fn until(&mut self, expression: &str) {
        let end = Instant::now() + PATIENCE;
        while self.run(expression) != true {
            assert!(Instant::now() < end, "never: {expression}\n{}", self.run("document.body?.innerText"));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Presses a key and lets go of it.
    pub(crate) fn press(&mut self, key: &str, code: u32, text: &str) {
        for kind in ["keyDown", "keyUp"] {
            let mut params = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code});
            if kind == "keyDown" && !text.is_empty() {
                params["text"] = text.into();
            }
            self.ask("Input.dispatchKeyEvent", params);
        }
    }

    /// The page as a picture.
    pub(crate) fn picture(&mut self) -> Vec<u8> {
        let said = self.ask("Page.captureScreenshot", json!({"captureBeyondViewport": true}));
        let mut bytes = Vec::new();
        let (mut bits, mut held) = (0u32, 0);
        for letter in said["data"].as_str().unwrap().bytes().filter(|letter| *letter != b'=') {
            let value = match letter {
                b'A'..=b'Z' => letter - b'A',
                b'a'..=b'z' => letter - b'a' + 26,
                b'0'..=b'9' => letter - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                other => panic!("{other} is no base 64"),
            };
            (bits, held) = (bits << 6 | u32::from(value), held + 6);
            if held >= 8 {
                held -= 8;
                bytes.push((bits >> held) as u8);
            }
        }
        bytes
    }
}
