extends Node
# The autoload that lets a trainer play: it runs first in each tick, and between two actions nothing else runs.
#
# When the ticks of an action are over, it ends episodes, sends the steps, waits for the next request, hands out the
# actions and lets the tick run. Without ENVMANAGER_ADDRESS the game plays by itself: one copy, by heuristic().

const Wire = preload("res://addons/envmanager/wire.gd")
const Roster = preload("res://addons/envmanager/roster.gd")
const Copy = preload("res://addons/envmanager/copy.gd")
const Spawner = preload("res://addons/envmanager/spawner.gd")
const Calls = preload("res://addons/envmanager/calls.gd")
const PROTOCOL = [1, 0]
const ADDON = "1.0.0"
const TICKS_ALONE = 4  # per action, when nobody trains
const BUSY_AFTER_US = 1000000
const FIRST = -(1 << 30)
const REQUESTS = {Wire.STEP: "_step", Wire.RESET: "_reset", Wire.CALL: "_call", Wire.CLOSE: "_quit"}

var _wire: Wire = null
var _roster: Roster = Roster.new()
var _config: Dictionary = {}
var _copies: Array = []
var _copy_at: Dictionary = {}  # root of a copy -> copy
var _ticks_left: int = 0
var _is_built: bool = false
var _is_broken: bool = true  # only a reset helps: at the beginning, and after an error


func _ready() -> void:
	pause_mode = PAUSE_MODE_PROCESS
	process_priority = FIRST
	var address = OS.get_environment("ENVMANAGER_ADDRESS")
	if address == "":
		return
	_wire = Wire.new()
	if not _wire.connect_to(address):
		_quit("no trainer listens at " + address)
		return
	var hello = {"protocol": PROTOCOL, "token": OS.get_environment("ENVMANAGER_TOKEN"), "addon": ADDON}
	var version = Engine.get_version_info()
	hello["engine"] = "%d.%d.%d" % [version.major, version.minor, version.patch]
	hello["ticks_per_second"] = Engine.iterations_per_second
	_wire.send_unasked(Wire.HELLO, hello)
	_configure()


# Agents that leave because the game ends are no news.
func _exit_tree() -> void:
	set_physics_process(false)


# Tells the trainer something at once, outside of the steps.
func note(about: String, values: Dictionary = {}) -> void:
	if _wire != null:
		var body = values.duplicate()
		body["name"] = about
		_wire.send_unasked(Wire.NOTE, body)


func joined(agent: Node) -> void:
	var copy = _copy_of(agent)
	if copy == null:
		return
	var group = _roster.group_of(agent)
	if group == null:
		return
	agent._copy = copy
	agent._group = group
	agent._k = copy.next_k
	agent._bits = 0
	agent._final = null
	agent._info = null
	agent.reward = 0.0
	agent.arena = copy.arena
	copy.next_k += 1
	copy.agents.append(agent)
	group.agents.append(agent)
	group.changed = true


func left(agent: Node, bits: int) -> void:
	if is_physics_processing():
		_roster.remove(agent, bits)
		agent._copy.agents.erase(agent)
		agent._copy.ended_agents.erase(agent)
		agent._k = -1


func arena_entered(arena: Node) -> void:
	var copy = _copy_of(arena)
	if copy == null:
		return
	if copy.arena != null and copy.arena != arena:
		_roster.fault("the scene has two arenas", arena)
		return
	copy.arena = arena
	copy.has_after_tick = arena.has_method("after_tick")
	arena._copy = copy
	arena.arena = arena
	arena.index = copy.index
	arena.shown = copy.shown
	arena.root = copy.root
	for agent in copy.agents:
		agent.arena = arena


func _physics_process(_delta: float) -> void:
	if not _is_built:
		_is_built = true
		_build()
	elif _ticks_left > 0:
		for copy in _copies:
			if copy.has_after_tick and copy.ended_bits == 0:
				copy.arena.after_tick()
		_ticks_left -= 1
		if _ticks_left > 0:
			return
		_end_action()
	while _ticks_left == 0 and is_physics_processing():
		if _wire == null:
			_play_alone()
		else:
			_serve()


func _serve() -> void:
	if not _wire.receive():
		_quit()
	elif not REQUESTS.has(_wire.kind):
		_quit("the trainer sent a frame of kind %d" % _wire.kind)
	else:
		call(REQUESTS[_wire.kind])


func _configure() -> void:
	if not _wire.receive() or _wire.kind == Wire.CLOSE:
		_quit()
		return
	var config = _wire.json()
	if _wire.kind != Wire.CONFIGURE or config == null:
		_quit("the trainer sent a frame of kind %d, not its configuration" % _wire.kind)
	elif int(config["protocol"][0]) != PROTOCOL[0]:
		_roster.fault("the addon speaks protocol %d; run `envmanager godot install-addon`" % PROTOCOL[0], null)
	else:
		_config = config
		_roster.with_infos = config["infos"]


# In the first tick, when the tree stands: nothing can be moved in it before.
func _build() -> void:
	if _wire == null:
		_copy_main_scene()
	elif not _config.empty():
		_build_copies()
	for copy in _copies:
		_check_copy(copy)
	_roster.check_specs()
	_roster.is_closed = true
	if _wire == null:
		_show_faults()
	elif not _send_faults():
		_wire.send_json(Wire.SPECS, _roster.specs())


func _copy_main_scene() -> void:
	if get_tree().current_scene != null:
		_add_copy(get_tree().current_scene, true)
		_announce(get_tree().current_scene)


# The main scene is there already, as one, and where the first copy should stand: it goes.
func _build_copies() -> void:
	var main = get_tree().current_scene
	var path = _config["scene"] if _config["scene"] != null else main.filename
	var scene = load(path) if ResourceLoader.exists(path, "PackedScene") else null
	if scene == null:
		_roster.fault("there is no scene %s" % path, null)
		return
	get_tree().root.remove_child(main)
	main.queue_free()
	var spawner = Spawner.new(get_tree(), _config)
	var told_us = OS.get_ticks_usec()
	for i in spawner.count:
		var root = scene.instance()
		_add_copy(root, i < spawner.shown)
		spawner.place(root, i)
		if _copies[0].arena != null:
			spawner.spacing = _copies[0].arena.spacing
		if OS.get_ticks_usec() - told_us > BUSY_AFTER_US:
			told_us = OS.get_ticks_usec()
			_wire.send(Wire.BUSY, PoolByteArray())


func _add_copy(root: Node, shown: bool) -> void:
	var copy = Copy.new()
	copy.index = _copies.size()
	copy.root = root
	copy.shown = shown
	_copies.append(copy)
	_copy_at[root] = copy


# Who entered the tree before the copy was known enters now, in the order of the tree.
func _announce(node: Node) -> void:
	if _is_ours(node):
		node._enter()
	for child in node.get_children():
		_announce(child)


func _check_copy(copy: Copy) -> void:
	var arena = copy.arena
	if arena == null:
		_roster.fault("the scene %s has no arena: no node with a script that extends arena.gd" % copy.root.name, null)
		return
	if copy.agents.empty() and arena.joins.empty():
		joined(arena)
	for scene in arena.joins:
		var guest = scene.instance()
		_declare(guest)
		guest.free()
	for group in _roster.groups:
		var here = 0
		for agent in copy.agents:
			here += int(agent._group == group)
		group.max_agents += int(max(int(arena.max_agents.get(group.name, 0)), here))
	if _wire == null:
		arena.rng.randomize()
	else:
		arena.rng.seed = int(_config["seed"]) + copy.index * 0x9E3779B9


func _declare(node: Node) -> void:
	if _is_ours(node):
		_roster.group_of(node)
	for child in node.get_children():
		_declare(child)


func _is_ours(node: Node) -> bool:
	return "_bridge" in node and node.has_method("heuristic")


func _copy_of(node: Node) -> Copy:
	while node != null:
		if _copy_at.has(node):
			return _copy_at[node]
		node = node.get_parent()
	return null


# The agents see the end of their episodes, then the next ones begin.
func _end_action() -> void:
	for copy in _copies:
		for agent in copy.enders():
			_roster.close_episode(agent, agent._bits)
	if _roster.with_infos:
		_roster.keep_infos()
	if _wire == null:
		_show_episodes()
	for copy in _copies:
		copy.begin_next()
	if _wire != null:
		_send_steps({})


func _send_steps(only: Dictionary) -> void:
	var sections = _roster.written(only)
	if not _send_faults():
		var frame = Wire.int_bytes(PoolIntArray([OS.get_ticks_usec() - _wire.received_us]))
		frame.append_array(sections)
		_wire.send(Wire.STEPS, frame)


func _step() -> void:
	if _is_broken:
		_roster.fault("a reset must come before this step: at the beginning, and after an error", null)
	else:
		_roster.act(_wire.body)
	if not _send_faults():
		_ticks_left = int(_config["ticks_per_action"])


func _reset() -> void:
	var request = _wire.json()
	var indices = range(_copies.size()) if request["arenas"] == null else request["arenas"]
	var only = {}
	_is_broken = false
	for i in indices.size():
		var copy = _copies[int(indices[i])]
		only[copy.index] = true
		if request["seeds"] != null and request["seeds"][i] != null:
			copy.arena.rng.seed = int(request["seeds"][i])
		copy.options = request["options"] if request["options"] != null else {}
		copy.begin()
	_roster.forget_leavers()
	if _roster.with_infos:
		_roster.keep_infos()
	_send_steps({} if request["arenas"] == null else only)


func _call() -> void:
	var answer = Calls.answer(_wire.json(), _copies)
	if answer.has("message"):
		_wire.send_json(Wire.ERROR, answer)
	elif not _send_faults():
		_wire.send_json(Wire.VALUE, answer)


# Answers with an error if there was one. Script errors are in the log only: Godot 3 does not tell them.
func _send_faults() -> bool:
	var faults = _roster.faults
	_roster.faults = []
	if faults.empty():
		return false
	_is_broken = true
	_wire.send_json(Wire.ERROR, faults[0])
	return true


func _play_alone() -> void:
	if _copies.empty() or _copies[0].arena == null:
		set_physics_process(false)
		return
	if _is_broken:
		_is_broken = false
		_copies[0].begin()
	for group in _roster.groups:
		group.acting = []
		for agent in group.agents:
			if agent.wants_action:
				group.acting.append(agent)
		group.leavers = []
		_roster.play_alone(group)
	_ticks_left = TICKS_ALONE


# One line per episode, so that a person who plays sees what a trainer would.
func _show_episodes() -> void:
	_show_faults()
	for agent in _copies[0].enders():
		var how = "terminated" if agent._bits == 1 else "truncated"
		print("%s (%s): reward %.3f, %s" % [agent.name, agent.behavior, agent.reward, how])
		agent._bits = 0
		agent._final = null
		agent.reward = 0.0


func _show_faults() -> void:
	for fault in _roster.faults:
		push_error("EnvManager: %s" % fault["message"])
	_roster.faults = []


func _quit(why: String = "") -> void:
	if why != "":
		printerr("EnvManager: ", why)
	set_physics_process(false)
	get_tree().quit(0 if why == "" else 1)
