//! A real browser for tests, driven over the pipe of its own debugging protocol: no driver beside it, no port. For
//! tests alone: what goes wrong here ends the test.
#![allow(clippy::unwrap_used)]

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::Duration,
};

use serde_json::{Value, json};

/// Names the browser: one of Chromium's kind.
pub const BROWSER_VARIABLE: &str = "OMNI_BROWSER";
/// Names under which it is looked for.
const NAMES: [&str; 4] = [
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
];
/// How long an answer may take, and a condition to come true.
const ANSWER: Duration = Duration::from_secs(60);
const CONDITION: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(50);
/// Messages of the protocol end with this.
const END: u8 = 0;

/// The browser of this machine, if there is one.
pub fn find() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(BROWSER_VARIABLE) {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    let folders: Vec<_> = std::env::split_paths(&path).collect();
    let candidates = NAMES
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    candidates.into_iter().find(|path| path.is_file())
}

/// A running browser with one page.
#[derive(Debug)]
pub struct Browser {
    process: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    next: u64,
    session: String,
    /// What the page has complained of: exceptions, errors of the console, broken policies.
    complaints: Vec<String>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts it on an empty page.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start(program: &std::path::Path) -> Self {
        let profile = tempfile::tempdir().unwrap();
        // The protocol is spoken over the files 3 and 4.
        let script = r#"exec "$@" 3<&0 4>&1 0</dev/null 1>/dev/null"#;
        let mut process = Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(program)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
            ])
            .args(["--disable-dev-shm-usage", "--remote-debugging-pipe"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(process.stdout.take().unwrap());
        let (sender, from) = channel();
        std::thread::spawn(move || {
            let mut message = vec![];
            while out.read_until(END, &mut message).is_ok_and(|read| read > 0) {
                let text = message.strip_suffix(&[END]).unwrap_or(&message);
                let Ok(value) = serde_json::from_slice(text) else {
                    return;
                };
                if sender.send(value).is_err() {
                    return;
                }
                message.clear();
            }
        });
        let mut browser = Self {
            to: process.stdin.take().unwrap(),
            process,
            from,
            next: 0,
            session: String::new(),
            complaints: vec![],
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", &json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", &attach);
        browser.session = attached["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, &json!({}));
        }
        browser
    }

    /// One call of the protocol.
    fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.next += 1;
        let id = self.next;
        let mut message = json!({"id": id, "method": method, "params": parameters});
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(END);
        self.to.write_all(&bytes).unwrap();
        self.to.flush().unwrap();
        loop {
            let heard = self.from.recv_timeout(ANSWER);
            let heard = heard.unwrap_or_else(|why: RecvTimeoutError| panic!("{method}: {why}"));
            if heard["id"] == id {
                assert!(heard["error"].is_null(), "{method}: {}", heard["error"]);
                return heard["result"].clone();
            }
            self.note(&heard);
        }
    }

    fn note(&mut self, heard: &Value) {
        let complaint = match heard["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Log.entryAdded") => heard["params"]["entry"]["level"] == "error",
            Some("Runtime.consoleAPICalled") => heard["params"]["type"] == "error",
            _ => false,
        };
        if complaint {
            self.complaints.push(heard["params"].to_string());
        }
    }

    /// Opens an address, and waits until the page is there.
    ///
    /// # Panics
    /// When it cannot be opened.
    pub fn open(&mut self, url: &str) {
        let opened = self.call("Page.navigate", &json!({"url": url}));
        assert!(opened["errorText"].is_null(), "{url}: {opened}");
        self.until("document.readyState === 'complete'");
    }

    /// Evaluates an expression in the page; promises are waited for.
    ///
    /// # Panics
    /// When it throws.
    pub fn eval(&mut self, expression: &str) -> Value {
        let ask = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", &ask);
        let thrown = &answer["exceptionDetails"];
        assert!(thrown.is_null(), "{expression}: {thrown}");
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    ///
    /// # Panics
    /// When it does not become so.
    pub fn until(&mut self, expression: &str) {
        let start = base::clock::now();
        while self.eval(expression) != json!(true) {
            if start.elapsed() > CONDITION {
                let text = self.eval("document.body.innerText");
                panic!(
                    "never {expression}; the page says:\n{text}\n{:?}",
                    self.complaints
                );
            }
            std::thread::sleep(POLL);
        }
    }

    /// What the page has complained of since the last time.
    pub fn complaints(&mut self) -> Vec<String> {
        self.eval("0");
        std::mem::take(&mut self.complaints)
    }

    /// A picture of the page, PNG in base64.
    ///
    /// # Panics
    /// When the browser makes none.
    pub fn screenshot(&mut self) -> String {
        let shot = self.call(
            "Page.captureScreenshot",
            &json!({"captureBeyondViewport": true}),
        );
        shot["data"].as_str().unwrap().to_owned()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
