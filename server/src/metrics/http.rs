//! Plain HTTP: `/metrics` for Prometheus, `/health` and `/alive` for a supervisor, and `/`, the status page. It only tells. Without a token it
//! tells sums, as the metrics do; what names keys of blocks (`/prefixes`, `/reads`) asks for a token that may administer, where
//! the server has tokens.

use std::io::ErrorKind::TimedOut;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};

use super::answer::Answer;
use super::{host, page, prefixes, segments, text};
use crate::state::{Caller, Lobby, Right, ServerState};
use kvarts_layout::NamespaceId;

/// The most bytes of a request that are read.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// How long a client may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Clients at a time that have not asked yet, that are answered how the server is, and that are answered anything else.
const SILENT_MAX: usize = 64;
const HEALTH_MAX: usize = 64;
const ANSWERED_MAX: usize = 32;

/// Serves until the future is dropped. A listener that only this host reaches is asked by this host's names, if it is not open.
pub async fn serve(listener: TcpListener, is_open: bool, state: Arc<ServerState>) {
    let is_own = !is_open && listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    let [silent, health, answered] = [SILENT_MAX, HEALTH_MAX, ANSWERED_MAX].map(Lobby::new);
    loop {
        // ends: the task is aborted at a stop
        match listener.accept().await {
            Ok((mut stream, _)) => {
                let (state, guest) = (Arc::clone(&state), silent.enter());
                let (health, answered) = (health.clone(), answered.clone());
                let serve = async move {
                    let request = guest.unless_lost(request(&mut stream)).await.ok_or(TimedOut)??;
                    drop(guest);
                    // How the server is can be asked whatever else is asked for.
                    let is_probe = is_probe(path_of(&request));
                    let place = if is_probe { health.enter() } else { answered.enter() };
                    place.unless_lost(answer(&mut stream, &request, is_own, &state)).await.ok_or(TimedOut)?
                };
                tokio::spawn(async move {
                    // A client that is slow or gone gets nothing, and that is not worth a line.
                    let _: Result<std::io::Result<()>, _> = tokio::time::timeout(TIMEOUT, serve).await;
                });
            }
            // Out of descriptors, for example: the next one may work.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// The head of a request.
async fn request(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        // ends: `TIMEOUT` of the connection, in `serve`
        let read = stream.read(&mut piece).await?;
        request.extend_from_slice(piece.get(..read).unwrap_or_default());
        if read == 0 || request.len() > REQUEST_BYTES_MAX {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
    }
    Ok(request)
}

/// The method and the target that a request names.
fn line_of(request: &[u8]) -> (&[u8], &[u8]) {
    let line = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&byte| byte == b' ');
    (words.next().unwrap_or_default(), words.next().unwrap_or_default())
}

fn path_of(request: &[u8]) -> &[u8] {
    line_of(request).1.split(|&byte| byte == b'?').next().unwrap_or_default()
}

/// What supervisors ask: whether clients should be sent here (`/health`), and whether the process should be started anew (`/alive`).
fn is_probe(path: &[u8]) -> bool {
    matches!(path, b"/health" | b"/alive")
}

/// A server that serves says so in its first line; what it does without, in a line each, stands below.
fn probed(fault: Option<String>, without: &[String]) -> Answer {
    match fault {
        None => {
            let lines = ["ok"].into_iter().chain(without.iter().map(String::as_str));
            Answer::plain("200 OK", lines.flat_map(|line| [line, "\n"]).collect())
        }
        Some(why) => Answer::plain("503 Service Unavailable", format!("{why}\n")),
    }
}

async fn answer(
    stream: &mut TcpStream,
    request: &[u8],
    is_own: bool,
    state: &ServerState,
) -> std::io::Result<()> {
    let (method, path) = line_of(request);
    let has_body = match method {
        b"GET" => true,
        b"HEAD" => false,
        _ => {
            let only =
                Answer::plain("405 Method Not Allowed", "only GET and HEAD are supported\n".to_owned());
            // ends: `TIMEOUT` of the connection, in `serve`
            return only.with("allow: GET, HEAD\r\n").send(stream, true).await;
        }
    };
    // How the server is may be known to any page, and no more: no path of a directory.
    let is_page = is_own && !host::is_own(header(request, "host"));
    if is_page && !is_probe(path_of(request)) {
        let why = "the host name in the request is not allowed: use the address of this host or localhost; for other names set listen.open_metrics\n";
        // ends: `TIMEOUT` of the connection, in `serve`
        return Answer::plain("421 Misdirected Request", why.to_owned()).send(stream, has_body).await;
    }
    let query = path.splitn(2, |&byte| byte == b'?').nth(1);
    let answer = match path_of(request) {
        b"/metrics" => Answer {
            kind: "text/plain; version=0.0.4; charset=utf-8",
            ..Answer::plain("200 OK", text::render(state).await)
        },
        b"/health" => probed(state.fault(), &if is_page { Vec::new() } else { state.lost_directories() }),
        b"/alive" => probed(state.engine.health().cured_by_a_restart(), &[]),
        b"/history" => Answer::json(&state.metrics.history.told()),
        b"/segments" => Answer::json(&segments::map(state.engine.segments(), state.engine.segment_bytes())),
        b"/reads" => match caller(state, request) {
            Ok(caller) => Answer::json(&prefixes::reads(state, &caller)),
            Err(refusal) => refusal,
        },
        b"/prefixes" => match caller(state, request) {
            Ok(caller) => match prefixes::told(state, &caller, namespace(query)).await {
                Ok(told) => Answer::json(&told),
                Err(why) => Answer::plain("503 Service Unavailable", format!("{why}\n")),
            },
            Err(refusal) => refusal,
        },
        path => page::page(path).unwrap_or_else(|| {
            Answer::plain(
                "404 Not Found",
                "this path does not exist: the paths are /, /metrics, /health, /alive, /history, /segments, /prefixes and /reads\n"
                    .to_owned(),
            )
        }),
    };
    // ends: `TIMEOUT` of the connection, in `serve`
    answer.send(stream, has_body).await
}

/// The namespace that a query names.
fn namespace(query: Option<&[u8]>) -> Option<NamespaceId> {
    std::str::from_utf8(query?).ok()?.strip_prefix("namespace=")?.parse().ok()
}

/// Who asks, if it may administer.
fn caller(state: &ServerState, request: &[u8]) -> Result<Caller, Answer> {
    let refused = |why: &str| {
        if state.audit.may_tell() {
            tracing::warn!(target: "audit", path = "http", why, "call refused");
        }
        Answer::plain("401 Unauthorized", format!("{why}\n")).with("www-authenticate: Bearer\r\n")
    };
    let caller = state.gate.caller(header(request, "authorization"), state.clock().unix_millis() / 1000);
    let caller = caller.map_err(|refusal| refused(refusal.text()))?;
    match caller.rights.has(Right::Admin) {
        true => Ok(caller),
        false => Err(refused("the token lacks the right `admin`")),
    }
}

/// The value of a line of a request's head.
fn header<'a>(request: &'a [u8], name: &str) -> Option<&'a [u8]> {
    request.split(|&byte| byte == b'\n').skip(1).find_map(|line| {
        let at = line.iter().position(|&byte| byte == b':')?;
        let (found, value) = line.split_at(at);
        found.eq_ignore_ascii_case(name.as_bytes()).then(|| value.get(1..).unwrap_or_default().trim_ascii())
    })
}
