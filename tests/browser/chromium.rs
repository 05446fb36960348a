//! A headless browser, controlled by its DevTools protocol over a WebSocket.

use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tungstenite::{Message, WebSocket};

const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];
/// Time limit of each step; the browser may be starved on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum height of a screenshot, in CSS pixels.
const MAX_HEIGHT: f64 = 8000.0;
const READ_BACK: &str = include_str!("read_back.js");

pub(crate) struct Screen {
    pub(crate) name: &'static str,
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// Device pixels per CSS pixel.
    pub(crate) scale: u32,
    pub(crate) mobile: bool,
    pub(crate) dark: bool,
}

pub(crate) struct OpenedPage {
    /// As PNG.
    pub(crate) screenshot: Vec<u8>,
    pub(crate) read: Value,
    /// Console messages, exceptions, and the browser's complaints.
    pub(crate) complaints: Vec<String>,
    /// Requests for anything but the page itself.
    pub(crate) requests: Vec<String>,
}

pub(crate) struct Browser {
    process: Child,
    socket: WebSocket<TcpStream>,
    last: u64,
    events: Vec<Value>,
}

impl Browser {
    pub(crate) fn start(profile: &Path) -> Result<Self> {
        fs::create_dir_all(profile)?;
        let mut process = NAMES
            .iter()
            .find_map(|name| {
                Command::new(name)
                    .args([
                        "--headless=new",
                        // Its sandbox does not run as root, and the pages are our own.
                        "--no-sandbox",
                        "--disable-gpu",
                        "--disable-dev-shm-usage",
                        "--disable-extensions",
                        "--disable-background-networking",
                        "--disable-component-update",
                        "--disable-sync",
                        "--no-first-run",
                        "--no-default-browser-check",
                        "--hide-scrollbars",
                        "--remote-debugging-port=0",
                    ])
                    .arg(format!("--user-data-dir={}", profile.display()))
                    .arg("about:blank")
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .ok()
            })
            .with_context(|| format!("there is none of {}", NAMES.join(", ")))?;
        match connect(&profile.join("DevToolsActivePort"), &mut process) {
            Ok(socket) => Ok(Self {
                process,
                socket,
                last: 0,
                events: Vec::new(),
            }),
            Err(error) => {
                let _ = process.kill();
                let _ = process.wait();
                Err(error.context("the browser does not get ready"))
            }
        }
    }

    pub(crate) fn open(&mut self, file: &Path, screen: &Screen) -> Result<OpenedPage> {
        let target = self.call(None, "Target.createTarget", &json!({"url": "about:blank"}))?;
        let target = target["targetId"].as_str().context("no target")?.to_owned();
        let session = self.call(
            None,
            "Target.attachToTarget",
            &json!({"targetId": target, "flatten": true}),
        )?;
        let session = session["sessionId"].as_str().context("no session")?.to_owned();
        let on = Some(session.as_str());
        for domain in ["Page.enable", "Runtime.enable", "Log.enable", "Network.enable"] {
            self.call(on, domain, &json!({}))?;
        }
        self.call(
            on,
            "Emulation.setDeviceMetricsOverride",
            &json!({"width": screen.width, "height": screen.height, "deviceScaleFactor": screen.scale, "mobile": screen.mobile}),
        )?;
        let scheme = if screen.dark { "dark" } else { "light" };
        self.call(
            on,
            "Emulation.setEmulatedMedia",
            &json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]}),
        )?;
        self.events.clear();
        let url = format!("file://{}", fs::canonicalize(file)?.display());
        self.call(on, "Page.navigate", &json!({"url": url}))?;
        self.loaded(&session)?;
        let read = self.call(
            on,
            "Runtime.evaluate",
            &json!({"expression": READ_BACK, "returnByValue": true}),
        )?;
        let layout = self.call(on, "Page.getLayoutMetrics", &json!({}))?;
        let height = layout["cssContentSize"]["height"].as_f64().unwrap_or_default();
        let height = height.clamp(f64::from(screen.height), MAX_HEIGHT);
        let whole = json!({"x": 0, "y": 0, "width": screen.width, "height": height, "scale": 1});
        let shot = self.call(
            on,
            "Page.captureScreenshot",
            &json!({"format": "png", "captureBeyondViewport": true, "clip": whole}),
        )?;
        let screenshot = from_base64(shot["data"].as_str().context("no screenshot")?)?;
        // Collects late events with the next answer.
        self.call(on, "Runtime.evaluate", &json!({"expression": "1"}))?;
        let events = std::mem::take(&mut self.events);
        self.call(None, "Target.closeTarget", &json!({"targetId": target}))?;
        let text = read["result"]["value"].as_str();
        let read = serde_json::from_str(text.with_context(|| format!("nothing could be read back: {read}"))?)?;
        let of = |method: &'static str| events.iter().filter(move |event| event["method"] == method);
        let complaints = ["Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"];
        Ok(OpenedPage {
            screenshot,
            read,
            complaints: complaints
                .iter()
                .flat_map(|method| of(method))
                .map(|event| event["params"].to_string())
                .collect(),
            requests: of("Network.requestWillBeSent")
                .filter_map(|event| event["params"]["request"]["url"].as_str())
                // The icon is in the page itself.
                .filter(|request| *request != url && !request.starts_with("data:"))
                .map(str::to_owned)
                .collect(),
        })
    }

    pub(crate) fn close(mut self) -> Result<()> {
        self.call(None, "Browser.close", &json!({}))?;
        let deadline = Instant::now() + TIMEOUT;
        while self.process.try_wait()?.is_none() {
            if Instant::now() >= deadline {
                bail!("the browser does not end");
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn loaded(&mut self, session: &str) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let is_it = |event: &Value| event["method"] == "Page.loadEventFired" && event["sessionId"] == session;
            if self.events.iter().any(is_it) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                bail!("the page does not load");
            }
            let event = self.receive()?;
            self.events.push(event);
        }
    }

    fn call(&mut self, session: Option<&str>, method: &str, parameters: &Value) -> Result<Value> {
        self.last += 1;
        let mut call = json!({"id": self.last, "method": method, "params": parameters});
        if let Some(session) = session {
            call["sessionId"] = session.into();
        }
        self.socket.send(Message::text(call.to_string()))?;
        loop {
            let answer = self.receive().with_context(|| format!("no answer to {method}"))?;
            if answer["id"] != self.last {
                self.events.push(answer);
            } else if answer["error"].is_null() {
                return Ok(answer["result"].clone());
            } else {
                bail!("{method}: {}", answer["error"]);
            }
        }
    }

    fn receive(&mut self) -> Result<Value> {
        loop {
            if let Message::Text(text) = self.socket.read()? {
                return Ok(serde_json::from_str(text.as_str())?);
            }
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Already gone where it was closed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Connects to the port that the browser writes to a file when it is ready.
fn connect(file: &Path, process: &mut Child) -> Result<WebSocket<TcpStream>> {
    let deadline = Instant::now() + TIMEOUT;
    let (port, path) = loop {
        let text = fs::read_to_string(file).unwrap_or_default();
        let mut lines = text.lines();
        if let (Some(port), Some(path)) = (lines.next(), lines.next()) {
            break (port.parse::<u16>()?, path.to_owned());
        }
        if let Some(status) = process.try_wait()? {
            bail!("it ended: {status}");
        }
        if Instant::now() >= deadline {
            bail!("it names no port");
        }
        thread::sleep(Duration::from_millis(20));
    };
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let (socket, _) = tungstenite::client(format!("ws://127.0.0.1:{port}{path}"), stream)
        .map_err(|error| anyhow::anyhow!("it does not speak WebSocket: {error}"))?;
    Ok(socket)
}

/// Bytes of base64 with its padding (RFC 4648, 4).
fn from_base64(text: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for c in text.bytes().filter(|c| *c != b'=') {
        let value = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => bail!("the screenshot is no base64"),
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Ok(bytes)
}
