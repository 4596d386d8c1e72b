//! An object storage on loopback, for the benchmark alone: it answers the requests that the cold tier makes of S3, from memory, after a
//! latency, and at a rate if one is set. It checks no signature.
//!
//! A thread for each connection, which counts its own processor time: so that of the side that asks can be told.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Bytes that are sent at once where there is a rate.
const PIECE: usize = 256 << 10;
/// The longest body that is taken.
const BODY_MOST: usize = 1 << 30;

/// How it answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manners {
    /// From the end of a request to the first byte of its answer.
    pub(super) latency: Duration,
    /// Bytes of bodies a second, of all connections together.
    pub(super) rate: Option<u64>,
}

/// How it fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Trouble {
    /// Connections end without an answer.
    Outage,
    /// 503 with Retry-After.
    Busy,
    /// Answers begin late.
    Slow,
    /// Connections break in the middle of bodies.
    Truncated,
    /// A bit of each body is another one.
    Altered,
}

impl Trouble {
    /// All of them, with names.
    pub(super) const ALL: [(&'static str, Self); 5] = [
        ("outage", Self::Outage),
        ("busy", Self::Busy),
        ("slow", Self::Slow),
        ("truncated", Self::Truncated),
        ("altered", Self::Altered),
    ];
}

/// How late slow answers begin.
const SLOW: Duration = Duration::from_millis(300);

#[derive(Debug, Default)]
struct State {
    trouble: Option<Trouble>,
    objects: BTreeMap<String, (Arc<Vec<u8>>, u64)>,
    writes: u64,
    /// When the next byte may go out.
    next: Option<Instant>,
}

/// The storage. Its threads end with their connections.
#[derive(Debug)]
pub(super) struct Objects {
    manners: Manners,
    port: u16,
    state: Mutex<State>,
    requests: AtomicU64,
    sent: AtomicU64,
    /// Requests that met trouble.
    troubled: AtomicU64,
    /// Processor time of its threads, in nanoseconds.
    cpu: AtomicU64,
}

impl Objects {
    /// Starts it.
    pub(super) fn start(manners: Manners) -> io::Result<Arc<Self>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let objects = Arc::new(Self {
            manners,
            port,
            state: Mutex::default(),
            requests: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            troubled: AtomicU64::new(0),
            cpu: AtomicU64::new(0),
        });
        let accepting = Arc::clone(&objects);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let objects = Arc::clone(&accepting);
                // A connection that breaks ends its thread.
                std::thread::spawn(move || drop(objects.serve(&stream)));
            }
        });
        Ok(objects)
    }

    /// Where it is.
    pub(super) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Requests and bytes of bodies that it answered, and seconds of processor time that this took.
    pub(super) fn served(&self) -> (u64, u64, f64) {
        let [requests, sent, cpu] =
            [&self.requests, &self.sent, &self.cpu].map(|count| count.load(Ordering::Relaxed));
        (requests, sent, Duration::from_nanos(cpu).as_secs_f64())
    }

    /// It fails so from now on, or does not any more.
    pub(super) fn set(&self, trouble: Option<Trouble>) {
        self.lock().trouble = trouble;
    }

    /// Requests that met trouble so far.
    pub(super) fn troubled(&self) -> u64 {
        self.troubled.load(Ordering::Relaxed)
    }

    /// Takes out the objects whose path begins so.
    pub(super) fn remove_below(&self, prefix: &str) {
        self.lock().objects.retain(|path, _| !path.starts_with(prefix));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, stream: &TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let (mut from, mut to) = (BufReader::with_capacity(64 << 10, stream), stream);
        let mut counted = thread_cpu();
        while let Some(asked) = Asked::read(&mut from)? {
            std::thread::sleep(self.manners.latency);
            let trouble = self.lock().trouble;
            self.troubled.fetch_add(u64::from(trouble.is_some()), Ordering::Relaxed);
            let answer = match trouble {
                Some(Trouble::Outage) => return stream.shutdown(Shutdown::Both),
                Some(Trouble::Busy) => Answer::of("503 Slow Down", "Retry-After: 1\r\n"),
                _ => self.answer(asked),
            };
            if trouble == Some(Trouble::Slow) {
                std::thread::sleep(SLOW);
            }
            self.requests.fetch_add(1, Ordering::Relaxed);
            to.write_all(answer.head.as_bytes())?;
            if let Some((object, from, until)) = &answer.body {
                let body = object.get(*from..*until).unwrap_or_default();
                if matches!(trouble, Some(Trouble::Truncated | Trouble::Altered)) {
                    let (first, rest) = body.split_at(body.len() / 2);
                    to.write_all(first)?;
                    if trouble == Some(Trouble::Truncated) {
                        return stream.shutdown(Shutdown::Both);
                    }
                    let altered: Vec<u8> = rest.iter().take(1).map(|byte| byte ^ 1).collect();
                    to.write_all(&altered)?;
                    to.write_all(rest.get(1..).unwrap_or_default())?;
                    continue;
                }
                for piece in body.chunks(if self.manners.rate.is_some() { PIECE } else { body.len().max(1) })
                {
                    self.wait_for(piece.len());
                    to.write_all(piece)?;
                }
                self.sent.fetch_add(body.len() as u64, Ordering::Relaxed);
            }
            let now = thread_cpu();
            self.cpu.fetch_add((now - counted).as_nanos() as u64, Ordering::Relaxed);
            counted = now;
        }
        Ok(())
    }

    /// Waits until this number of bytes may go out.
    fn wait_for(&self, bytes: usize) {
        let Some(rate) = self.manners.rate else { return };
        let now = Instant::now();
        let at = {
            let mut state = self.lock();
            let at = state.next.map_or(now, |next| next.max(now));
            state.next = Some(at + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64));
            at
        };
        std::thread::sleep(at.saturating_duration_since(now));
    }

    fn answer(&self, asked: Asked) -> Answer {
        let found = self.lock().objects.get(&asked.path).cloned();
        match asked.method.as_str() {
            "PUT" => {
                let is_changed = asked.must_be_absent && found.is_some()
                    || asked.must_be.is_some_and(|tag| found.as_ref().map(|(_, is)| *is) != Some(tag));
                if is_changed {
                    return Answer::of("412 Precondition Failed", "");
                }
                let mut state = self.lock();
                state.writes += 1;
                let tag = state.writes;
                state.objects.insert(asked.path, (Arc::new(asked.body), tag));
                Answer::of("200 OK", &format!("ETag: \"{tag}\"\r\n"))
            }
            "DELETE" => {
                self.lock().objects.remove(&asked.path);
                Answer::of("204 No Content", "")
            }
            "GET" | "HEAD" => {
                let Some((object, tag)) = found else { return Answer::of("404 Not Found", "") };
                let all = object.len();
                let (status, from, until) = match asked.range {
                    Some((from, last)) if from < all => ("206 Partial Content", from, (last + 1).min(all)),
                    Some(_) => return Answer::of("416 Range Not Satisfiable", ""),
                    None => ("200 OK", 0, all),
                };
                let place = match asked.range {
                    Some(_) => format!("Content-Range: bytes {from}-{}/{all}\r\n", until - 1),
                    None => String::new(),
                };
                let length = until - from;
                let head = format!(
                    "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nETag: \"{tag}\"\r\n{place}Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n"
                );
                let body = (asked.method == "GET").then_some((object, from, until));
                Answer { head, body }
            }
            _ => Answer::of("501 Not Implemented", ""),
        }
    }
}

/// Processor time of this thread.
fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

struct Answer {
    head: String,
    body: Option<(Arc<Vec<u8>>, usize, usize)>,
}

impl Answer {
    fn of(status: &str, more: &str) -> Self {
        Self { head: format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n{more}\r\n"), body: None }
    }
}

/// A request.
#[derive(Debug, Default)]
struct Asked {
    method: String,
    path: String,
    range: Option<(usize, usize)>,
    must_be: Option<u64>,
    must_be_absent: bool,
    body: Vec<u8>,
}

impl Asked {
    /// The next one; none at the end of the connection.
    fn read(from: &mut impl BufRead) -> io::Result<Option<Self>> {
        let mut line = String::new();
        if from.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let mut words = line.split_whitespace();
        let mut word = || words.next().unwrap_or_default().to_owned();
        let mut asked = Self { method: word(), path: word(), ..Self::default() };
        asked.path.truncate(asked.path.find('?').unwrap_or(asked.path.len()));
        let mut length = 0;
        loop {
            line.clear();
            if from.read_line(&mut line)? == 0 || line == "\r\n" {
                break;
            }
            let Some((name, value)) = line.split_once(':') else { continue };
            let value = value.trim();
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = value.parse().unwrap_or(0),
                "range" => asked.range = range(value),
                "if-match" => asked.must_be = Some(value.trim_matches('"').parse().unwrap_or(0)),
                "if-none-match" => asked.must_be_absent = true,
                _ => {}
            }
        }
        if length > BODY_MOST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        asked.body = vec![0; length];
        from.read_exact(&mut asked.body)?;
        Ok(Some(asked))
    }
}

/// `bytes=FROM-LAST`.
fn range(value: &str) -> Option<(usize, usize)> {
    let (from, last) = value.strip_prefix("bytes=")?.split_once('-')?;
    Some((from.parse().ok()?, last.parse().ok()?)).filter(|(from, last)| from <= last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn ask(objects: &Objects, text: &str) -> String {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, objects.port)).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn it_answers_ranges_and_conditions_as_s3_does() {
        let objects = Objects::start(Manners { latency: Duration::ZERO, rate: Some(1 << 30) }).unwrap();
        let put = |more: &str, body: &str| {
            ask(&objects, &format!("PUT /b/o HTTP/1.1\r\nContent-Length: {}\r\n{more}\r\n{body}", body.len()))
        };
        assert!(ask(&objects, "GET /b/o HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(put("If-None-Match: *\r\n", "hello, cold").contains("ETag: \"1\""));
        assert!(put("If-None-Match: *\r\n", "other").starts_with("HTTP/1.1 412"));
        assert!(put("If-Match: \"7\"\r\n", "other").starts_with("HTTP/1.1 412"));
        let some = ask(&objects, "GET /b/o HTTP/1.1\r\nRange: bytes=7-9\r\n\r\n");
        assert!(some.starts_with("HTTP/1.1 206") && some.ends_with("\r\n\r\ncol"), "{some}");
        assert!(put("If-Match: \"1\"\r\n", "second").contains("ETag: \"2\""));
        let both = ask(&objects, "HEAD /b/o HTTP/1.1\r\n\r\nGET /b/o HTTP/1.1\r\n\r\n");
        assert!(both.matches("Content-Length: 6").count() == 2 && both.ends_with("second"), "{both}");
        assert_eq!(objects.served().1, 9);
    }
}
