@tool
extends RefCounted
## A program that the dock runs, what it has printed, and its end.
##
## It prints into a file, which outlives the editor. Its standard input is a pipe that only the editor holds open: a
## program that ends when its input ends (`--until-eof`) also ends when the editor is killed. OS.execute_with_pipe does
## not give that: each program that the editor starts later, such as the game, would hold the pipe open too.

const KEPT := 500  # lines
const MOST := 1 << 20  # bytes that are read at once; of more, the last ones
const KILLED_AFTER_S := 30.0
# The arguments: file to print into, pipe to read from, the program and its own arguments.
const SCRIPT := 'exec <"$1" >>"$0" 2>&1; rm -f "$1"; shift; exec "$@"'

## The command line, as for a terminal.
var text := ""
## The last lines that it has printed.
var lines := PackedStringArray()
## Its last warnings: workers that were replaced, and why.
var warnings := PackedStringArray()
## Its exit code; -1 while it runs.
var exit_code := -1

var _pid := -1
var _input: FileAccess = null
var _ends_with_input := false
var _output := ""
var _n_read := 0
var _begun_ms := 0
var _ended_ms := 0
var _stopped_ms := -1


## Starts the program that the first of these words names, and returns whether that was possible.
func start(words: PackedStringArray, output: String) -> bool:
	text = quoted(words)
	_ends_with_input = words.has("--until-eof")
	_output = output
	_n_read = _length()
	_begun_ms = Time.get_ticks_msec()
	var is_there := FileAccess.file_exists(output)
	if FileAccess.open(output, FileAccess.READ_WRITE if is_there else FileAccess.WRITE) == null:
		exit_code = 127
		lines.append("Error: %s cannot be written: %s." % [output, error_string(FileAccess.get_open_error())])
		return false
	var name := "envmanager-" + Crypto.new().generate_random_bytes(8).hex_encode()
	_input = FileAccess.open("pipe://" + name, FileAccess.READ_WRITE)
	if _input != null:
		var arguments := PackedStringArray(["-c", SCRIPT, output, "/tmp/" + name])
		_pid = OS.create_process("/bin/sh", arguments + words)
	if _pid < 0:
		exit_code = 127
		lines.append("Error: /bin/sh could not be started.")
	return _pid >= 0


func is_running() -> bool:
	return exit_code < 0


func is_stopping() -> bool:
	return is_running() and was_stopped()


func was_stopped() -> bool:
	return _stopped_ms >= 0


## Seconds that it has run.
func seconds() -> float:
	return ((Time.get_ticks_msec() if is_running() else _ended_ms) - _begun_ms) / 1000.0


## Ends its input, so that it may save what it has. It is killed KILLED_AFTER_S later, by a second call, or at once if
## it does not end with its input.
func stop() -> void:
	if not is_running():
		return
	var was_stopping := is_stopping()
	_stopped_ms = Time.get_ticks_msec()
	_input.close()
	if was_stopping or not _ends_with_input:
		_kill()


## Waits until it has ended, after stop().
func wait() -> void:
	while is_running():
		OS.delay_msec(20)
		poll()


## Reads what it has printed, and returns whether there is news.
func poll() -> bool:
	if not is_running():
		return false
	var code := OS.get_process_exit_code(_pid)
	if code < 0 and _stopped_ms >= 0 and Time.get_ticks_msec() - _stopped_ms > KILLED_AFTER_S * 1000.0:
		_kill()
		return true
	if code >= 0:
		exit_code = code
		_ended_ms = Time.get_ticks_msec()
	return _read() or code >= 0


## The last error that it has printed, without the evidence below it; "" without one.
func error() -> String:
	for i in range(lines.size() - 1, -1, -1):
		if lines[i].begins_with("Error: "):
			return "\n".join(lines.slice(i)).get_slice("\n\n", 0)
	return ""


## Words as a command line, in quotes where a shell would split or replace them.
static func quoted(words: PackedStringArray) -> String:
	var plain := RegEx.create_from_string("^[A-Za-z0-9_./:=@%+,-]+$")
	var parts := PackedStringArray()
	for word in words:
		parts.append(word if plain.search(word) else "'" + word.replace("'", "'\\''") + "'")
	return " ".join(parts)


func _kill() -> void:
	# The program leads a process group of its own. What it has started may be in it.
	OS.execute("/bin/sh", ["-c", "kill -KILL -%d" % _pid])
	OS.kill(_pid)  # which also waits for its end
	exit_code = 128 + 9
	_ended_ms = Time.get_ticks_msec()
	_read()


func _length() -> int:
	var file := FileAccess.open(_output, FileAccess.READ)
	return 0 if file == null else file.get_length()


func _read() -> bool:
	var file := FileAccess.open(_output, FileAccess.READ)
	if file == null or file.get_length() <= _n_read:
		return false
	_n_read = maxi(_n_read, file.get_length() - MOST)
	file.seek(_n_read)
	var bytes := file.get_buffer(file.get_length() - _n_read)
	var whole := bytes.size() if not is_running() else bytes.rfind(10) + 1
	if whole == 0:
		return false
	_n_read += whole
	for line in bytes.slice(0, whole).get_string_from_utf8().trim_suffix("\n").split("\n"):
		lines.append(line)
		if line.begins_with("Warning: "):
			warnings.append(line.trim_prefix("Warning: "))
	lines = lines.slice(maxi(0, lines.size() - KEPT))
	warnings = warnings.slice(maxi(0, warnings.size() - KEPT))
	return true
