//! `kvarts serve`: runs the daemon until SIGTERM, SIGINT or a drain.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use crate::files;
use kvarts_server::config::{Config, LogFormat, Settings};
use kvarts_server::daemon::{Daemon, notify};
use kvarts_server::state::Reloaded;
use kvarts_store::home::Stop;
use kvarts_terminal::Failure;

/// Time in which a stopped start removes the files that it made.
const START_ENDS_WITHIN: Duration = Duration::from_secs(3);
/// The most bytes of a configuration file.
const CONFIG_BYTES_MAX: usize = 1 << 20;

/// Arguments of `kvarts serve`, and of whatever needs its configuration.
#[derive(Args, Clone, Debug)]
pub(crate) struct ServeArgs {
    /// The configuration, a TOML file [default: $KVARTS_CONFIG, or none]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) settings: Settings,
}

impl ServeArgs {
    /// The configuration that these arguments, the environment and the file give together.
    pub(crate) fn resolve(&self) -> Result<Config, Failure> {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        Settings::refuse_unknown(names).map_err(Failure::user)?;
        let path = self.config.clone().or_else(|| std::env::var_os("KVARTS_CONFIG").map(PathBuf::from));
        let text = path.as_ref().map(|path| files::read_text(path, CONFIG_BYTES_MAX, "a configuration"));
        let text = text.transpose()?;
        let file = path.as_deref().zip(text.as_deref());
        Config::resolve(file, |name| std::env::var(name).ok(), &self.settings).map_err(Failure::user)
    }
}

/// Serves until a signal or a drain ends the server.
pub(crate) fn run(arguments: &ServeArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let config = arguments.resolve()?;
    log(&config)?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(config.threads).thread_name("kvarts-serve").enable_all();
    let runtime = runtime.build().map_err(Failure::user)?;
    let served = runtime.block_on(serve(arguments, &config, out));
    runtime.shutdown_background();
    served
}

async fn serve(arguments: &ServeArgs, config: &Config, out: &mut dyn Write) -> Result<(), Failure> {
    let mut terminate = signal(SignalKind::terminate()).map_err(Failure::user)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::user)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(Failure::user)?;
    let mut starting = Starting::begin(config);
    let mut daemon = tokio::select! {
        // ends: a start has limits of its own, and a signal ends it
        started = &mut starting.task => started.map_err(Failure::user)?.map_err(Failure::User)?,
        _ = terminate.recv() => return starting.stop("a signal to stop was received").await,
        _ = interrupt.recv() => return starting.stop("interrupted").await,
    };
    tell_start(config, &daemon);
    announce(config, &daemon, out)?;
    let mut reloads = daemon.state().reloads.take();
    let served = loop {
        tokio::select! {
            _ = terminate.recv() => {
                tracing::info!("a signal to stop was received");
                break Ok(());
            }
            _ = interrupt.recv() => {
                tracing::info!("interrupted");
                break Ok(());
            }
            // A closed terminal must not end a server that others use, either.
            _ = hangup.recv() => drop(reload(&daemon, arguments).await),
            Some(asked) = next(&mut reloads) => {
                // One who does not wait any more finds it in the log.
                let _ = asked.send(reload(&daemon, arguments).await);
            }
            ended = daemon.drained() => {
                match &ended {
                    Ok(()) => tracing::info!("drained"),
                    Err(why) => tracing::error!("{why}"),
                }
                break ended;
            }
        }
    };
    notify::tell("STOPPING=1");
    if served.is_ok() {
        tokio::select! {
            () = daemon.lame_duck() => {}
            // One who says it twice does not want to wait.
            // ends: `lame_duck`, the arm before these
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
    daemon.stop().await.map_err(Failure::User)?;
    tracing::info!("stopped, with a checkpoint");
    // What was acknowledged is safe; that no client was served any more is a failure all the same.
    served.map_err(Failure::User)
}

/// The log's lines of a start: settings, what was decided, what the store is.
fn tell_start(config: &Config, daemon: &Daemon) {
    // Settings that were given stand before what they made of the store; defaults are for readers who look for them.
    let (defaults, set): (Vec<_>, Vec<_>) = config.origins.iter().partition(|one| one.from == "default");
    for setting in set {
        tracing::info!("{} = {} ({})", setting.name, setting.value, setting.from);
    }
    for setting in defaults {
        tracing::debug!("{} = {} (default)", setting.name, setting.value);
    }
    for note in &daemon.state().decided.notes {
        tracing::info!("{note}");
    }
    tracing::info!("kvarts {}, {}", env!("CARGO_PKG_VERSION"), daemon.opened());
    if let Some(warning) = daemon.opened().warning(&config.directories) {
        tracing::warn!("{warning}");
    }
    for warning in daemon.in_memory().into_iter().chain(daemon.ownerless()) {
        tracing::warn!("{warning}");
    }
    for lost in daemon.state().lost_directories() {
        tracing::warn!("{lost}");
    }
    if let Some(short) = daemon.state().engine.health().short_of_disk {
        tracing::warn!("{short}");
    }
}

/// Says that it serves, and where: to who started it, and to the service manager.
fn announce(config: &Config, daemon: &Daemon, out: &mut dyn Write) -> Result<(), Failure> {
    let shown = |place: Option<String>| place.unwrap_or_else(|| "none".to_owned());
    let socket = shown(daemon.socket().map(|path| path.display().to_string()));
    let grpc = shown(daemon.grpc().map(|address| address.to_string()));
    let metrics = shown(daemon.metrics().map(|address| address.to_string()));
    // One line that programs can wait for and read, of the same form as the log's beside it.
    let serving = format!("serving grpc={grpc} metrics={metrics} socket={socket}");
    match config.log_format {
        LogFormat::Text => writeln!(out, "{serving}")?,
        LogFormat::Json => {
            let mut now = String::new();
            // It fails for no time that a clock has.
            let _ = SystemTime.format_time(&mut Writer::new(&mut now));
            let fields = json!({ "message": serving });
            let line = json!({ "timestamp": now, "level": "INFO", "fields": fields, "target": "kvarts" });
            writeln!(out, "{line}")?;
        }
    }
    out.flush()?;
    notify::tell("READY=1");
    Ok(())
}

/// A start under way, beside which signals are heard.
struct Starting {
    task: JoinHandle<Result<Daemon, String>>,
    stop: Stop,
}

impl Starting {
    fn begin(config: &Config) -> Self {
        let (config, stop) = (config.clone(), Stop::default());
        let told = stop.clone();
        Self { task: tokio::spawn(async move { Daemon::start_unless(&config, &told).await }), stop }
    }

    /// Ends it. One that waits for a directory, a cluster or a bucket removes what it made; what does not end in time goes with the
    /// process: a store that is there is as after a kill.
    async fn stop(self, why: &str) -> Result<(), Failure> {
        tracing::info!("{why} during the start");
        notify::tell("STOPPING=1");
        self.stop.tell();
        match tokio::time::timeout(START_ENDS_WITHIN, self.task).await {
            // It had just begun to serve.
            Ok(Ok(Ok(daemon))) => daemon.stop().await.map_err(Failure::User)?,
            Ok(Ok(Err(refused))) => tracing::info!("the start has ended: {refused}"),
            Ok(Err(failed)) => return Err(Failure::user(failed)),
            Err(_) => {
                tracing::info!(
                    "the server did not finish its start in time and was stopped as if killed: the next start recovers \
                    the store"
                )
            }
        }
        tracing::info!("stopped before serving");
        Ok(())
    }
}

/// The next asking for a reload.
async fn next(
    asked: &mut Option<mpsc::Receiver<oneshot::Sender<Reloaded>>>,
) -> Option<oneshot::Sender<Reloaded>> {
    match asked {
        Some(asked) => asked.recv().await,
        None => std::future::pending().await,
    }
}

/// Reads the configuration again and takes over what can change while the server runs.
async fn reload(daemon: &Daemon, arguments: &ServeArgs) -> Reloaded {
    let told = |failure: &Failure| match failure {
        Failure::User(why) => why.clone(),
        other => format!("{other:?}"),
    };
    let reloaded = match arguments.resolve() {
        Ok(config) => daemon.reload(&config).await,
        Err(failure) => Err(told(&failure)),
    };
    match &reloaded {
        Ok(notes) => {
            tracing::info!(target: "audit", "tenants, tokens and certificates are reloaded");
            notes.iter().for_each(|note| tracing::info!("{note}"));
        }
        Err(why) => {
            tracing::error!(target: "audit", "the configuration was not reloaded, and no setting was \
                changed: {why}");
        }
    }
    reloaded
}

/// Modules of others whose lines beyond `info` may tell of headers or bytes: they are never written.
const OTHERS: [&str; 8] = ["h2", "hyper", "hyper_util", "tonic", "tower", "rustls", "tokio_util", "mio"];

/// Whether a line may be written, whatever is asked for.
fn may_be_written(line: &tracing::Metadata<'_>) -> bool {
    let module = line.target().split("::").next().unwrap_or_default();
    *line.level() <= tracing::Level::INFO || !OTHERS.contains(&module)
}

fn log(config: &Config) -> Result<(), Failure> {
    use tracing_subscriber::filter::filter_fn;
    use tracing_subscriber::prelude::*;
    let filter: Targets = config
        .log_level
        .parse()
        .map_err(|error| Failure::User(format!("configuration: log.level: {error}")))?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match config.log_format {
        LogFormat::Json => lines.json().boxed(),
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).boxed(),
    };
    let set = tracing_subscriber::registry().with(lines.with_filter(filter_fn(may_be_written))).with(filter);
    set.try_init().map_err(|error| Failure::User(format!("the log cannot be written: {error}")))
}
