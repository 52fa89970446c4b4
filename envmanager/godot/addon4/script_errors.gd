extends Logger
## Script errors, as the engine logs them (Godot 4.5 and later). Loaded only where there is a Logger.

var _errors: Array = []
var _mutex := Mutex.new()


func _log_error(
	function: String, file: String, line: int, code: String, rationale: String, _editor: bool, type: int, _traces: Array
) -> void:
	if type != ERROR_TYPE_SCRIPT:
		return
	var message := rationale if rationale != "" else code
	_mutex.lock()
	if _errors.size() < 16:
		_errors.append({"message": message, "script": file, "line": line, "function": function, "arena": null})
	_mutex.unlock()


## The errors since the last call.
func take() -> Array:
	_mutex.lock()
	var taken := _errors
	_errors = []
	_mutex.unlock()
	return taken
