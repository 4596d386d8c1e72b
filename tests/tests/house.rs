//! Rules of the house that a script can check.

mod c_interface;
mod circles;
mod licences;
mod pages;
mod releases;
mod rooms;
mod scripts;
mod tidy;
mod waits;
