extends Node
## The autoload that lets a trainer play: it runs first in each tick, and between two actions nothing else runs.
##
## When the ticks of an action are over, it ends episodes, sends the steps, waits for the next request, hands out the
## actions and lets the tick run. Without an address the game plays by itself: one copy, by policies or heuristic().

const Wire := preload("res://addons/envmanager/wire.gd")
const Roster := preload("res://addons/envmanager/roster.gd")
const Copy := preload("res://addons/envmanager/copy.gd")
const Copies := preload("res://addons/envmanager/copies.gd")
const Spawner := preload("res://addons/envmanager/spawner.gd")
const Calls := preload("res://addons/envmanager/calls.gd")
const Declared := preload("res://addons/envmanager/declared.gd")
const Pictures := preload("res://addons/envmanager/pictures.gd")
const PROTOCOL := [1, 0]
const ADDON := "1.0.0"
const FIRST := -(1 << 30)
const PATIENCE := 60  # ticks that a game has to change its scene
const INSTEAD := ". Let the arena's reset() put everything back instead"
const REMOVED := "the arena is gone, because the game has freed it, or changed to a scene without one" + INSTEAD
const CHANGED := "the game has changed or reloaded its scene, which needs one arena per engine (n_workers = n_envs)" + INSTEAD
const RESETS := "the game has changed or reloaded its scene in a reset(), which the new one needs again" + INSTEAD
const ARGUMENT := "--envmanager="
const REQUESTS := {Wire.STEP: "_step", Wire.RESET: "_reset", Wire.CALL: "_call", Wire.CLOSE: "_quit", Wire.BEGIN: "_begin"}

var pictures := Pictures.new()
var _wire: Wire = null
var _roster := Roster.new()
var _errors: RefCounted = null  # the script errors, where the engine tells them (4.5 and later)
var _config := {}
var _copies := Copies.new()
var _ticks_left := 0
var _is_acting := false  # a step waits for its answer
var _is_torn := false  # the game changes its scene
var _patience := 0
var _bodies: Array[RigidBody2D] = []
var _is_on_demand := false  # the trainer begins each episode
var _is_built := false
var _told := {}  # messages of faults; each is shown once
var _is_broken := true  # only a reset helps: at the beginning, and after an error


func _init() -> void:
	if ClassDB.class_exists("Logger"):
		_errors = load("res://addons/envmanager/script_errors.gd").new()
		OS.call("add_logger", _errors)


func _ready() -> void:
	process_mode = Node.PROCESS_MODE_ALWAYS
	process_physics_priority = FIRST
	var address := _address()
	if address == "":
		return
	_wire = Wire.new()
	if not _wire.connect_to(address):
		_quit("no trainer listens at " + address)
		return
	var hello := {"protocol": PROTOCOL, "token": OS.get_environment("ENVMANAGER_TOKEN"), "addon": ADDON}
	var version := Engine.get_version_info()
	hello["engine"] = "%d.%d.%d" % [version.major, version.minor, version.patch]
	hello["ticks_per_second"] = Engine.physics_ticks_per_second
	_wire.send_json(Wire.HELLO, hello, 0)
	_configure()
	get_tree().node_added.connect(_on_node_added)
	get_tree().node_removed.connect(_on_node_removed)


# Where the trainer listens. The argument is for the editor, which has it in the project's settings.
func _address() -> String:
	for argument in OS.get_cmdline_args() + OS.get_cmdline_user_args():
		if argument.begins_with(ARGUMENT):
			return argument.substr(len(ARGUMENT))
	return OS.get_environment("ENVMANAGER_ADDRESS")


# Agents that leave because the game ends are no news.
func _exit_tree() -> void:
	set_physics_process(false)


## Tells the trainer something at once, outside of the steps.
func note(about: String, values := {}) -> void:
	if _wire != null:
		var body := values.duplicate()
		body["name"] = about
		_wire.send_json(Wire.NOTE, body, 0)


# Numpad 1 to 9, or Ctrl with 1 to 9, ask the trainer to freeze or unfreeze the first to the ninth behavior.
func _input(event: InputEvent) -> void:
	if _wire != null and event is InputEventKey and event.pressed and not event.echo:
		var number: int = event.keycode - (KEY_1 if event.ctrl_pressed else KEY_KP_1)
		if number >= 0 and number < mini(_roster.groups.size(), 9):
			note("toggle_frozen", {"behavior": _roster.groups[number].name})


func joined(agent: Node) -> void:
	var copy := _copy_of(agent)
	if copy == null:
		return
	var group := _roster.group_of(agent)
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
	pictures.is_old = true
	if is_physics_processing():
		_roster.remove(agent, bits if agent._copy.ended_bits == 0 else agent._copy.ended_bits)
		agent._copy.agents.erase(agent)
		agent._copy.ended_agents.erase(agent)
		agent._k = -1


func arena_entered(arena: Node) -> void:
	var copy := _copy_of(arena)
	if copy == null:
		if _is_built and _copies.all.size() > 1:
			_roster.fault(CHANGED, arena)
		return
	if copy.arena != null and copy.arena != arena:
		if not _is_going(copy.arena):
			_roster.fault("the scene has two arenas", arena)
			return
		arena_left(copy.arena)
	copy.arena = arena
	copy.has_after_tick = arena.has_method("after_tick")
	arena._copy = copy
	arena.arena = arena
	arena.index = copy.index
	arena.shown = copy.shown
	arena.root = copy.root
	arena.rng = copy.rng if copy.rng != null else arena.rng
	copy.rng = arena.rng
	for agent in copy.agents:
		agent.arena = arena


func arena_left(arena: Node) -> void:
	var copy: Copy = arena._copy
	if not is_physics_processing() or copy.arena != arena:
		return
	copy.arena = null
	copy.has_after_tick = false
	copy.first_new_k = copy.next_k
	_copies.torn.append(copy)
	_is_torn = true
	_patience = PATIENCE
	if copy.reset_tick == Engine.get_physics_frames():
		_roster.fault(RESETS, arena)


func _is_going(node: Node) -> bool:
	while node != null and not node.is_queued_for_deletion():
		node = node.get_parent()
	return node != null


# The copy that a node is in. The scene to which a game has changed takes the place of the one that has gone.
func _copy_of(node: Node) -> Copy:
	var copy := _copies.of(node)
	return copy if copy != null or not _is_torn else _copies.successor(node)


# A write to the transform of these bodies is lost unless it was read since their last move. A renderer reads it.
func _on_node_added(node: Node) -> void:
	if node is RigidBody2D:
		_bodies.append(node)


func _on_node_removed(node: Node) -> void:
	if node is RigidBody2D:
		_bodies.erase(node)


func _physics_process(_delta: float) -> void:
	if not _is_built:
		_is_built = true
		_build()
		return  # what has just come into the tree has no tick of its own yet: the first action would be shorter for it
	for body in _bodies:
		body.get_global_position()
	if _is_torn and not _mend():
		return
	if _ticks_left > 0:
		for copy in _copies.all:
			if copy.has_after_tick and copy.ended_bits == 0:
				copy.arena.after_tick()
		_ticks_left -= 1
	if _ticks_left > 0 or _is_torn:
		return
	if _is_acting:
		_is_acting = false
		_end_action()
	while _ticks_left == 0 and not _is_torn and is_physics_processing():
		if _wire == null:
			_play_alone()
		else:
			_serve()


# Whether every copy has an arena again, after the game has changed its scene. The ticks until then do not count.
func _mend() -> bool:
	_patience -= 1
	var scene := get_tree().current_scene
	if scene != null and _copies.of(scene) == null:
		_copies.announce(scene)  # it came before the old one went
	var is_whole := _copies.is_whole()
	if not is_whole and (_patience > 0 or _wire == null):
		return false
	if not is_whole:
		_roster.fault(REMOVED, null)
	elif _copies.is_swapped and _copies.all.size() > 1:
		_roster.fault(CHANGED, null)
	for copy in _copies.torn:
		if copy.arena != null:
			_join_alone(copy)
			for agent in copy.agents:
				if agent._k >= copy.first_new_k:
					_roster.succeed(agent)
			copy.end_episode(1)
	_copies.torn.clear()
	_copies.is_swapped = false
	_is_torn = false
	if _is_acting and _wire != null and _send_faults():
		_is_acting = false
		_ticks_left = 0
	return true


func _serve() -> void:
	if not _wire.receive():
		_quit()
	elif _is_broken and not _copies.is_whole() and _wire.kind != Wire.CLOSE:
		_quit(REMOVED)
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
		_wire.may_spin = config.get("may_spin", false)


# In the first tick, when the tree stands: nothing can be moved in it before.
func _build() -> void:
	if _wire == null:
		_adopt_main_scene()
	elif not _config.is_empty():
		_copy_scene()
	for copy in _copies.all:
		if copy.arena != null:
			_prepare(copy)
			if copy.index == 0 and copy.arena.training != null:
				_roster.training = Declared.told_by(copy.arena, copy.arena.training)
				if not "round_learners" in copy.arena.training:
					_roster.fault("the training of the arena is no EnvManagerTraining", copy.arena)
	_copies.declare_to(_roster)
	_roster.check_specs()
	_roster.is_closed = true
	if _wire == null:
		_show_faults()
	elif not _send_faults():
		for agent in _copies.all[0].agents:
			if _roster.misfit(agent) != "":
				note("misfit", {"problem": "%s (node %s)" % [_roster.misfit(agent), agent.name]})
		_wire.send_json(Wire.SPECS, _roster.specs())


func _adopt_main_scene() -> void:
	if get_tree().current_scene != null:
		_copies.add(get_tree().current_scene, true)
		_copies.announce(get_tree().current_scene)


# The main scene is there already, as one, and where the first copy should stand: it goes.
func _copy_scene() -> void:
	var main := get_tree().current_scene
	var path: String = _config["scene"] if _config["scene"] != null else main.scene_file_path
	var scene: PackedScene = load(path) if ResourceLoader.exists(path, "PackedScene") else null
	if scene == null:
		_roster.fault("there is no scene %s" % path, null)
		return
	get_tree().root.remove_child(main)
	main.queue_free()
	_copies.spawn(scene, Spawner.new(get_tree(), _config), Callable(self, "_say_busy"))
	for lost in Declared.lost_in(scene, _copies.all[0].root):
		_roster.fault(lost, null)


func _say_busy() -> void:
	_wire.send(Wire.BUSY, PackedByteArray())


func _prepare(copy: Copy) -> void:
	_join_alone(copy)
	if _wire == null:
		copy.arena.rng.randomize()
	else:
		copy.arena.rng.seed = int(_config["seed"]) + copy.index * 0x9E3779B9


# Without agents the arena is the agent.
func _join_alone(copy: Copy) -> void:
	if copy.agents.is_empty() and copy.arena.joins.is_empty():
		joined(copy.arena)


# The agents see the end of their episodes, then the next ones begin.
func _end_action() -> void:
	var ending := _copies.ending.duplicate()  # what begins next may end at once, for the next action
	_copies.ending.clear()
	for copy in ending:
		for agent in copy.enders():
			_roster.close_episode(agent, agent._bits)
	if _roster.with_infos:
		_roster.keep_infos()
	if _wire == null:
		_show_episodes()
	for copy in ending:
		copy.begin_next()
	if _copies.begin_tasks() and _roster.with_infos:
		_roster.keep_infos()
	if _wire != null:
		_send_steps(_copies.with_rows(ending) if _is_on_demand else {})


func _send_steps(only: Dictionary) -> void:
	pictures.is_old = true
	if not only.is_empty():
		_roster.note_change()
	var out := PackedByteArray()
	out.resize(4)
	_roster.write(out, only)
	if not _send_faults():
		out.encode_u32(0, Time.get_ticks_usec() - _wire.received_us)
		_wire.send(Wire.STEPS, out)


func _step() -> void:
	if _is_broken:
		_roster.fault("a reset must come before this step: at the beginning, and after an error", null)
	else:
		_roster.act(_wire.body)
	if not _send_faults():
		_is_acting = true
		_ticks_left = int(_config["ticks_per_action"])


func _reset() -> void:
	var request = _wire.json()
	_is_on_demand = request.get("begins") != null
	for copy in _copies.all:
		copy.on_demand = _is_on_demand
		copy.rests = false
	if _is_on_demand:
		_reset_on_demand(request["begins"])
		return
	var all := range(_copies.all.size())
	var indices: Array = all if request["arenas"] == null else request["arenas"]
	var only := {}
	_is_broken = false
	for i in indices.size():
		var copy: Copy = _copies.all[int(indices[i])]
		only[copy.index] = true
		if request["seeds"] != null and request["seeds"][i] != null:
			copy.arena.rng.seed = int(request["seeds"][i])
		copy.options = request["options"] if request["options"] != null else {}
		copy.begin()
	_roster.forget_leavers()
	if _roster.with_infos:
		_roster.keep_infos()
	_send_steps({} if request["arenas"] == null else only)


# Only some episodes may begin. The other copies rest.
func _reset_on_demand(begins: Array) -> void:
	_is_broken = false
	for copy in _copies.all:
		copy.clear()
		copy.rest()
	_copies.note_begins(begins)
	_copies.begin_tasks()
	_roster.forget_leavers()
	if _roster.with_infos:
		_roster.keep_infos()
	_send_steps(_copies.with_rows([]))


# Episodes that begin when the next action is over. There is no answer.
func _begin() -> void:
	_copies.note_begins(_wire.json()["begins"])


func _call() -> void:
	for copy in _copies.all:
		copy.reset_tick = -1  # what a call changes is no reset()
	var answer := Calls.answer(_wire.json(), _copies.all)
	if answer.has("message"):
		_wire.send_json(Wire.ERROR, answer)
	elif not _send_faults():
		_wire.send_json(Wire.VALUE, answer)


# Answers with an error if there was one. Script errors first: they are the causes. Alone, they may be forgiven.
func _send_faults() -> bool:
	var all: Array = _errors.take() if _errors != null else []
	var forgives: String = _config.get("forgives", "")
	if _roster.faults.is_empty() and (forgives == "all" or forgives == "start" and _wire.kind == Wire.CONFIGURE):
		return false
	all += _roster.faults
	_roster.faults = []
	if all.is_empty():
		return false
	_is_broken = true
	_wire.send_json(Wire.ERROR, all[0])
	return true


func _play_alone() -> void:
	if _copies.all.is_empty() or _copies.all[0].arena == null:
		set_physics_process(false)
		return
	if _is_broken:
		_is_broken = false
		_copies.all[0].begin()
	for group in _roster.groups:
		group.acting = group.agents.filter(func(agent: Node) -> bool: return agent.wants_action)
		group.leavers = []
	_roster.play_alone()
	_is_acting = true
	_ticks_left = _roster.ticks_alone()


# One line per episode, so that a person who plays sees what a trainer would.
func _show_episodes() -> void:
	_show_faults()
	for agent in _copies.all[0].enders():
		var how := "terminated" if agent._bits == 1 else "truncated"
		print("%s (%s): reward %.3f, %s" % [agent.name, agent.behavior, agent.reward, how])
		agent._bits = 0
		agent._final = null
		agent.reward = 0.0


func _show_faults() -> void:
	for fault in _roster.faults:
		if not _told.has(fault["message"]):
			_told[fault["message"]] = true
			push_error("EnvManager: %s" % fault["message"])
	_roster.faults = []


func _quit(why := "") -> void:
	if why != "":
		printerr("EnvManager: ", why)
	set_physics_process(false)
	get_tree().quit(0 if why == "" else 1)
