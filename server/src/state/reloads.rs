//! Asks the program around the server to read its configuration again: where the configuration comes from is not known here.

use std::sync::{Mutex, PoisonError};

use tokio::sync::{mpsc, oneshot};

/// What became of a reload: what an operator should know, or why all stays as it was.
pub type Reloaded = Result<Vec<String>, String>;

/// Reloads that wait.
const WAITING_MAX: usize = 4;

/// Where reloads are asked for.
#[derive(Debug)]
pub struct Reloads {
    to: mpsc::Sender<oneshot::Sender<Reloaded>>,
    from: Mutex<Option<mpsc::Receiver<oneshot::Sender<Reloaded>>>>,
}

impl Default for Reloads {
    fn default() -> Self {
        let (to, from) = mpsc::channel(WAITING_MAX);
        Self { to, from: Mutex::new(Some(from)) }
    }
}

impl Reloads {
    /// What is asked for from now on, for the one who can do it.
    pub fn take(&self) -> Option<mpsc::Receiver<oneshot::Sender<Reloaded>>> {
        self.from.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Asks, and waits for what became of it. None where there is nothing to be read again.
    pub async fn ask(&self) -> Option<Reloaded> {
        if self.from.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            return None;
        }
        let (reply, answer) = oneshot::channel();
        // ends: the call's deadline, by `answer`
        self.to.send(reply).await.ok()?;
        // ends: the call's deadline, by `answer`
        answer.await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_asking_is_answered_by_the_one_who_took_it_on_and_at_once_where_there_is_none() {
        let reloads = Reloads::default();
        assert_eq!(reloads.ask().await, None);
        let mut asked = reloads.take().unwrap();
        assert!(reloads.take().is_none());
        let answering = async { asked.recv().await.unwrap().send(Err("no".to_owned())).unwrap() };
        assert_eq!(tokio::join!(reloads.ask(), answering).0, Some(Err("no".to_owned())));
        drop(asked);
        assert_eq!(reloads.ask().await, None);
    }
}
