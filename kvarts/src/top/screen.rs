//! The terminal while `kvarts top` has it: a second screen, keys without Enter. What was there before comes back at the end.

use std::io::{self, Write};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::stdio::stdin;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// The terminal's second screen, without a cursor; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// What a key means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Key {
    /// `q`, Escape, Ctrl-C or Ctrl-D.
    End,
    Other,
}

/// The terminal as it was, to be put back.
pub(super) struct Screen {
    before: Termios,
}

impl Screen {
    pub(super) fn take(out: &mut dyn Write) -> io::Result<Self> {
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        raw.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        let screen = Self { before };
        out.write_all(ENTER.as_bytes())?;
        Ok(screen)
    }

    /// Rows and columns; 24 and 80 where the terminal does not say.
    pub(super) fn size(&self) -> (usize, usize) {
        match tcgetwinsize(stdin()) {
            Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row.into(), size.ws_col.into()),
            _ => (24, 80),
        }
    }

    pub(super) fn draw(&self, lines: &[String], out: &mut dyn Write) -> io::Result<()> {
        // Each line is written over the one before, so that nothing flickers.
        let mut text = String::from("\x1b[H");
        for (number, line) in lines.iter().enumerate() {
            text.push_str(if number == 0 { "" } else { "\r\n" });
            text.extend(line.chars().filter(|letter| !letter.is_control()));
            text.push_str("\x1b[K");
        }
        text.push_str("\x1b[J");
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// The next key, if one comes in this time.
    pub(super) fn key(&self, wait: Duration) -> io::Result<Option<Key>> {
        let input = stdin();
        let mut ready = [PollFd::new(&input, PollFlags::IN)];
        let wait = Timespec { tv_sec: wait.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: 0 };
        match poll(&mut ready, Some(&wait)) {
            // The window changed its size.
            Err(rustix::io::Errno::INTR) | Ok(0) => return Ok(None),
            Err(error) => return Err(error.into()),
            Ok(_) => {}
        }
        let mut letters = [0; 16];
        let read = rustix::io::read(stdin(), &mut letters)?;
        let ends =
            read == 0 || letters.iter().take(read).any(|letter| matches!(letter, b'q' | b'Q' | 3 | 4 | 27));
        Ok(Some(if ends { Key::End } else { Key::Other }))
    }

    pub(super) fn leave(self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(LEAVE.as_bytes())?;
        out.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing put back.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}
