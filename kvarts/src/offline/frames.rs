//! Reads the frames of an export, from a file or from a program that writes one.

use std::fmt::Display;
use std::io::{ErrorKind, Read};

use kvarts_fsck::artifact::BLOCK_BYTES_MAX;
use kvarts_layout::export::{Frame, HEAD_BYTES, Head, Reading, Run, Totals};
use kvarts_terminal::Failure;

/// Where frames come from, and how that is called in an error.
pub(crate) struct Source<R> {
    name: String,
    read: R,
}

/// What is done with a run, whose payload is read next.
pub(crate) type EachRun<'a, R> = &'a mut dyn FnMut(&mut Source<R>, &Reading, &Run) -> Result<(), Failure>;

impl<R: Read> Source<R> {
    /// Frames from `read`.
    pub(crate) fn new(name: impl Display, read: R) -> Self {
        Self { name: name.to_string(), read }
    }

    /// What is wrong with it.
    pub(crate) fn fault(&self, what: impl Display) -> Failure {
        Failure::User(format!("{}: {what}", self.name))
    }

    /// Reads exactly as many bytes as `into` has.
    pub(crate) fn fill(&mut self, into: &mut [u8]) -> Result<(), Failure> {
        self.read.read_exact(into).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => self.fault("the file is incomplete: copy the file again"),
            _ => self.fault(error),
        })
    }

    /// Bytes of the payload of a run, if this machine can hold them.
    pub(crate) fn payload_bytes(&self, run: &Run) -> Result<usize, Failure> {
        if run.block_bytes > BLOCK_BYTES_MAX {
            return Err(self.fault(
                "the file has blocks of more than 1 GiB, which this program does not \
                support",
            ));
        }
        let whole = run.payload_bytes().and_then(|bytes| usize::try_from(bytes).ok());
        whole.ok_or_else(|| self.fault("a run of blocks does not fit the address space of this machine"))
    }

    /// Reads from front to back; what it held, and the value that names it. `each` reads the payload of its run.
    pub(crate) fn each_run(&mut self, each: EachRun<'_, R>) -> Result<(Totals, [u8; 32]), Failure> {
        let mut reading = Reading::new();
        loop {
            let mut head = [0; HEAD_BYTES];
            self.fill(&mut head)?;
            let head = Head::decode(&head).map_err(|error| self.fault(error))?;
            let mut body = vec![0; head.body_bytes()];
            self.fill(&mut body)?;
            match reading.frame(&head, &body).map_err(|error| self.fault(error))? {
                Frame::Run(run) => each(self, &reading, &run)?,
                Frame::End(totals) => {
                    return match self.read.read(&mut [0]) {
                        Ok(0) => Ok((totals, reading.chain())),
                        Ok(_) => Err(self.fault("bytes follow the end of the export")),
                        Err(error) => Err(self.fault(error)),
                    };
                }
                Frame::Begin(_) | Frame::Spec(_) | Frame::Identity(_) => {}
            }
        }
    }
}
