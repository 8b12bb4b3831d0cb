# Debian's packages of another machine, in folders of their own. Sourced; sets the array `apt`.

foreign_debian() { # MACHINE, and a folder for what apt notes
  local debian=${1/aarch64/arm64}
  mkdir -p "$2"/{lists,cache}/partial && touch "$2/status"
  apt=(-qq -o "APT::Architecture=$debian" -o "APT::Architectures=$debian" -o APT::Sandbox::User=root
    -o "Dir::State::Lists=$2/lists" -o "Dir::State::status=$2/status" -o "Dir::Cache=$2/cache")
  apt-get "${apt[@]}" update >&2
}
